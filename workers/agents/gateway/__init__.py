"""Lets any agent that speaks OpenAI's or Anthropic's API take the place of a rollout function.

Gateway            the HTTP server: keys, retries, streams        http_server.py
chat_completions   /v1/chat/completions                           each translates requests to `ChatRequest`s, and
anthropic_messages /v1/messages, /v1/messages/count_tokens        `Reply`s to what clients expect
responses          /v1/responses
Fields             a request's fields: unknown ones are refused by name
"""

from workers.agents.gateway.http_server import Gateway

__all__ = ["Gateway"]
