"""The offline interface: an engine inside the caller's process."""

from millrace.llm.async_llm import AsyncLLM
from millrace.llm.llm import LLM
from millrace.llm.outputs import Choice, Generation, StreamPart, ToolCall
from millrace.llm.ranking import Ranked, Score
from millrace.llm.stream import GenerationStream

__all__ = ["LLM", "AsyncLLM", "Choice", "Generation", "GenerationStream", "Ranked", "Score", "StreamPart", "ToolCall"]
