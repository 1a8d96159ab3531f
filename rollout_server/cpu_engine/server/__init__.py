"""HTTP routes of the embedded engine: SGLang's and OpenAI's."""
