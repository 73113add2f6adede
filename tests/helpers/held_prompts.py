"""Sixty-odd varied prompts: short, long, code, other scripts, emoji, several turns. Generated, not stored."""

from __future__ import annotations

import inspect
import json.decoder
import textwrap

SHORT = [
    "The capital of France is",
    "2 + 2 =",
    "Once upon a time",
    "The opposite of hot is",
    "Water boils at",
    "A",
    " ",
    "\n\n",
    "Q: Who wrote Hamlet?\nA:",
    "List three colours:",
    "My favourite food is",
    "The year 1984 was",
    "To be, or not to be,",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8,",
    "The chemical symbol for gold is",
    "Roses are red,",
    "ERROR 404:",
    "In conclusion,",
    "<html><body>",
    "She said: \"I don't",
    "e^(i*pi) =",
    "***",
]
SCRIPTS = [
    "La mer est belle quand",
    "Der schnelle braune Fuchs springt",
    "El perro corre por el parque y",
    "Привет, как дела?",
    "今日はとても良い天気ですね。",
    "机器学习是人工智能的一个分支，",
    "안녕하세요, 저는",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "Γειά σου Κόσμε",
    "สวัสดีชาวโลก",
    "Xin chào các bạn",
    "Çok güzel bir gün, değil mi?",
]
EMOJI = [
    "I love pizza 🍕 and",
    "👩‍👩‍👧‍👦 is a family emoji;",
    "🇫🇷🇩🇪🇯🇵 these flags are",
    "Weather: ☀️🌧️⛈️ →",
    "e\u0301 and é look the same but",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 text",
]
CODE = [
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; i++) {\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#!/bin/bash\nset -euo pipefail\n",
    '{"name": "Alice", "age":',
    "fn main() {\n    println!(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "    \t  indented\n\t\tmixed   spaces",
]
CHATS = [
    [{"role": "user", "content": "Hello! Who are you?"}],
    [{"role": "user", "content": "Give me a haiku about rivers."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What colour is the sky?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a pirate 🏴‍☠️."},
        {"role": "user", "content": "Où est la bibliothèque ?"},
        {"role": "assistant", "content": "Arr, là-bas!"},
        {"role": "user", "content": "Write `print('hi')` in Rust."},
        {"role": "assistant", "content": '```rust\nprintln!("hi");\n```'},
        {"role": "user", "content": "Merci. Now count to five."},
    ],
]


def long_texts() -> list[str]:
    """Prompts of about 170, 160 and 1,050 tokens: prose with numbers, and code."""
    code = inspect.getsource(json.decoder)
    prose = " ".join(
        f"On day {day} the mill ground {day * 37 % 101} sacks of {('wheat', 'rye', 'oats', 'barley')[day % 4]},"
        f" and the miller's {('daughter', 'son', 'cat')[day % 3]} counted {day * day % 53} fish in the race."
        for day in range(1, 7)
    )
    return [prose, textwrap.shorten(code[:600], 100_000), code[:3750]]
