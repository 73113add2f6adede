"""What the commands share on the terminal: argument parser, options, status line, progress bar and the chat screen.

May import `config`, `errors`, `params`, `sources`, `link.messages` and, to run a model in this process, `llm`; no
benchmark and no command. Start with `parser.py` and `settings_options.py`.
"""
