"""Text in and out: the tiktoken vocabulary, the chat template, and the parsers of tool calls and reasoning."""
