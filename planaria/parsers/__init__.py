"""What a model wrote, taken apart: reasoning, content, calls of tools. Pure.

A format is a generator that reads text from a `TextReader` and tells a `Findings` what it found; it asks for more text
by yielding. So streams and whole answers are read by the same lines, however the text was cut into pieces.
"""

TOOL_CALL_PARSERS = (
    "hermes", "llama3_json", "mistral", "qwen3_coder", "qwen3_xml", "pythonic", "deepseek_v3", "openai",
)  # fmt: skip
REASONING_PARSERS = ("qwen3", "deepseek_r1", "openai_gptoss")
