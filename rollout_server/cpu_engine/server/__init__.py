"""HTTP routes of the CPU engine: SGLang's and OpenAI's."""
