"""The protocols of OpenAI, Anthropic and Ollama: their bodies, requests and answers."""
