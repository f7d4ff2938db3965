"""The protocols of OpenAI, Anthropic and Ollama: bodies, requests made of them, and answers."""
