"""Lets any agent that speaks OpenAI's or Anthropic's API take the part of a rollout function.

Gateway            the HTTP server: keys, retries, streams        server.py
chat_completions   /v1/chat/completions                           each translates a request to a `ChatRequest`, and
messages           /v1/messages, /v1/messages/count_tokens        a `Completion` to what its clients expect
responses          /v1/responses
Fields             a request's fields: what is not read is refused by name
"""

from workers.agents.gateway.server import Gateway

__all__ = ["Gateway"]
