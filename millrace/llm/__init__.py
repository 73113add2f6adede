"""The offline interface: an engine inside the caller's process."""

from millrace.llm.llm import LLM
from millrace.llm.outputs import Choice, Generation, StreamPart
from millrace.llm.stream import GenerationStream

__all__ = ["LLM", "Choice", "Generation", "GenerationStream", "StreamPart"]
