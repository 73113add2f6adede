"""A large, varied, reproducible text for comparing tokenizers: scripts, code, emoji, whitespace, odd Unicode."""

from __future__ import annotations

import random

SENTENCES = [
    "The quick brown fox jumps over the lazy dog; it's 3,141.59 times faster than we'd thought, isn't it?",
    "I'LL say THEY'RE done, he'D go, you've won, I'm in, DON'T and 'twas.",
    "Straße, naïve café, Ærøskøbing, žluťoučký kůň, İstanbul'da ığdır, Łódź, fiancée résumé",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Україна їжачок ґанок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, ἐν ἀρχῇ ἦν ὁ λόγος",
    "我能吞下玻璃而不伤身体。２０２４年，人工智能的发展非常迅速！",
    "いろはにほへと ちりぬるを。カタカナとひらがなと漢字、ﾊﾝｶｸも。",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요, 세계! ㅋㅋㅋ",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت ٠١٢٣٤٥٦٧٨٩",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה שָׁלוֹם",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश १२३",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "სიყვარული აქცევს, Հայաստան, ᐃᓄᒃᑎᑐᑦ, ᏣᎳᎩ, አማርኛ, မြန်မာ, ខ្មែរ, བོད་ཡིག, 𐍈𐍂𐌰, 𒀀𒁀",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪🇯🇵 ❤️‍🔥 ☃ ✈️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🫠",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β → ½ ⅓ ² ₃ Ⅷ ㊿ ①②③ ∑∫√ ℵ₀",
    "“smart quotes” – dashes — … ‹› «» ‚‘’ ¿¡ § ¶ † ‡ • ′ ″",
    "e\u0301 n\u0303 a\u030a\u0323 \u1e9b\u0323 \u212b \ufb01 \u0958 가 각 각",
    "zero\u200bwidth\u200djoin\u2060er\ufeff nb\u00a0sp \u202eRTL\u202c \u3000ideographic \u2028line\u2029para \x85nel",
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f \x0b\x0c bell\x07",
    "\ufffd\ufffe\uffff \U0010ffff \U000e0001 \ue000 \ud7ff",
    "http://user:pw@example.com:8080/a/b.html?q=1&r=%20#frag foo@bar.org C:\\Windows\\System32 ~/x_y-z",
    "1234567890 12 345 6789 0.001 1e-10 0xDEADBEEF 1_000_000 ٣٤٥ १२३ 123abc456 v2.0.1-rc3",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case HTTPServer2XMLParser __init__",
    "▁ already ▁marked▁ text ▁▁ <0x0A> <0xFF> Ġ Ċ ĠĠ <unk> [PAD151700] <unused5>",
    "{'type': 'text', \"k\": [1, 2.5, null, true]}, <a href=\"x\">y</a> && || != === => -> :: ... ### --- ***",
]

CODE = '''\
import os, sys
from typing import List  # comment

class Foo(object):
\tdef bar(self, x: int = 0) -> List[str]:
        """Docstring with 'quotes' and \\n escapes."""
        if x != 0 and not self.baz:
            return [f"{i:>10}" for i in range(x) if i % 2 == 0]


        raise ValueError("bad")   \t

#include <stdio.h>
int main(void) {
    for (int i = 0; i < 10; ++i) { printf("%d\\n", i); }  // loop
\treturn 0;
}

SELECT a.id, COUNT(*) AS n FROM t AS a WHERE a.name LIKE '%x%' GROUP BY 1 HAVING n >= 2;
fn main() { let v: Vec<u8> = vec![0; 32]; println!("{:?}", v); }
<div class="a b"><p>Hello&nbsp;World</p></div>
'''

WHITESPACE = [
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r\n\r\n", "\t", "\t\t\t", " \n ", "\n \n", "  \t  ", "\n\t\n", "\x0b"),
    *("\u3000", " " * 15, " " * 40, " " * 97, "\n" * 33, "\t" * 40, " \t" * 9, "\u00a0\u00a0"),
]

LONG_RUNS = [
    *("a" * 3000, "ab" * 1500, "=" * 500, "!?" * 300, "0" * 700, "中" * 600, "é" * 400, "👍" * 200, "A" * 999),
    "-" * 1001,
]


def pieces(seed: int = 0) -> list[str]:
    """Texts to compare one by one, so that a difference is easy to see."""
    draw = random.Random(seed)
    return written_pieces(seed) + [_any_unicode(draw) for _ in range(150)]


def written_pieces(seed: int = 0) -> list[str]:
    """The texts without random code points, which new versions of Unicode do not affect."""
    draw = random.Random(seed)
    texts = ["", *SENTENCES, CODE, *WHITESPACE, *LONG_RUNS]
    texts += [space + sentence + space for sentence in SENTENCES for space in draw.sample(WHITESPACE, 3)]
    return texts + [_mixed(draw) for _ in range(150)]


def large_text(parts: list[str], seed: int = 0) -> str:
    """One text of more than a hundred thousand characters."""
    draw = random.Random(seed)
    parts = parts * 3
    draw.shuffle(parts)
    return "".join(part + draw.choice(["", " ", "\n", *WHITESPACE]) for part in parts)


def with_tokens(tokens: list[str], seed: int = 0, count: int = 80) -> list[str]:
    """Texts with special tokens next to each other, to words and to spaces."""
    draw = random.Random(seed)
    fillers = ["", "", " ", "  ", "\n", "a", " a ", "Hello", "\nuser\n", "é", "<", "|>", "中", " \n"]
    return ["".join(draw.choice(fillers) + draw.choice([*tokens, ""]) for _ in range(6)) for _ in range(count)]


def _mixed(draw: random.Random) -> str:
    words = " ".join(SENTENCES).split(" ") + CODE.split(" ")
    return "".join(
        draw.choice(words) + draw.choice([" ", " ", "", *WHITESPACE[:14]]) for _ in range(draw.randint(1, 40))
    )


def _any_unicode(draw: random.Random) -> str:
    """Any code points except surrogates, mostly from the planes in use."""
    ranges = [(0, 0x7F), (0x80, 0x24F), (0x250, 0x1FFF), (0x2000, 0x2BFF), (0x2E80, 0xD7FF), (0xE000, 0xFFFF)]
    ranges += [(0x10000, 0x1FAFF), (0x20000, 0x2FFFF), (0xE0000, 0x10FFFF)]
    return "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 60)))
