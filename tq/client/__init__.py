"""What producers and consumers use: the client, the loader, and what these share."""
