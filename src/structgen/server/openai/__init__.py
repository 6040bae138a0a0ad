"""The routes of OpenAI's API, with the fields that users of vLLM and SGLang send besides."""
