"""The HTTP routes of the embedded engine: those of SGLang, and OpenAI's."""
