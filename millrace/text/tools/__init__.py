"""Tool calls: how models write them, in the prompt and in the answer.

`formats` names the formats and finds a model's own in its chat template. `parser` finds calls in streamed text;
`json_calls` and `python_calls` read them. `grammar` builds the grammar of a forced call. `prompt` describes tools to
models whose chat template does not take any.
"""
