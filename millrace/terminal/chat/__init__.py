"""The chat: `screen` is the loop, `reader` reads turns, `markdown` shows answers, `conversation` holds the messages."""
