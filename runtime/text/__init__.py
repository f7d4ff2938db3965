"""Text and tokens: tokenizer, chat templates, tools, and text that grows with the tokens."""
