"""Answers of every format, cut at every place: what is streamed equals what is not, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.text.answer_events import AnswerEvent, CallArguments, CallEnd, CallStart, ReasoningSaid, TextSaid
from millrace.text.answer_parser import AnswerForm, answer_parser
from millrace.text.reasoning.formats import FORMATS as REASONING
from millrace.text.tools.formats import FORMATS, Function
from millrace.text.tools.json_scanner import JsonScanner, close_partial
from millrace.text.tools.written import write_calls

FUNCTIONS = (
    Function("get_weather", "d", {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}}),
    Function("now"),
)
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome", "days": 2}'

LATE = '{"arguments": {}, "name": "now"}\n</tool_call>\n'

ALICE = '```json\n{"name": "Alice", "age": 3}\n```'
"""Ordinary JSON in a fence; no function has this name."""

ANSWERS: list[tuple[str, str, list[object]]] = [
    ("hermes", "Just text, 2 < 3 and </tool_call>.", ["Just text, 2 < 3 and </tool_call>."]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n{LATE}',
        ["Let me see.", ("get_weather", PARIS), ("now", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "} \\" ]"}}', [("now", '{"a": "} \\" ]"}')]),
    ("hermes", '<tool_call>\n[{"name": "now"}, {"name": "now", "arguments": {}}]\n</tool_call>', [("now", "{}")] * 2),
    ("hermes", '<tool_call>{"name": "new", "arguments": {}}</tool_call> Done.', [("new", "{}"), " Done."]),
    ("hermes", "a <tool_call> b </tool_call> <tool", ["a <tool_call> b </tool_call> <tool"]),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', ['<tool_call>{"name": "now", "arguments": [1]}']),
    ("hermes", '<tool_call>{"name": "no', ['<tool_call>{"name": "no']),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1', [("now", '{"a": [1', "cut")]),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>',
        [("now", '{"a": ', "cut"), "x}}</tool_call>"],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "1\n2"}}</tool_call>', [("now", '{"a": "1\\n2"}')]),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {PARIS}\n</tool_call> ok', [("now", PARIS), " ok"]),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {PARIS}', [("now", PARIS)]),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {PARIS}}}}}\n</tool_call>', [("now", PARIS)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>', [("now", "{}")]),
    ("llama3", '[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]', [("now", "{}")] * 2),
    ("llama3", '{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}', [("now", "{}")] * 2),
    ("llama3", '{"name": "now", "parameters": {}}, and so', [("now", "{}"), ", and so"]),
    ("llama3", "[1, 2] it is", ["[1, 2] it is"]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', [("now", "{}")]),
    (
        "llama3",
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "get_weather", "parameters": {ROME}}}',
        [("get_weather", PARIS), ("get_weather", ROME)],
    ),
    ("llama3", '{"type": "function", "function": {"name": "now", "parameters": {}}}', [("now", "{}")]),
    ("llama3", '{"answer": 42, "name": "now"} is it', ['{"answer": 42, "name": "now"} is it']),
    ("llama3", '{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
    ("llama3", 'Hi {"name": "now", "parameters": {}}', ['Hi {"name": "now", "parameters": {}}']),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "now", "arguments": {{}}}}, {{"name":"get_weather","arguments":{PARIS}}}]',
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    (
        "mistral",
        f"Hi.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
        ["Hi.", ("get_weather", ROME), ("now", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]what is this", ["[TOOL_CALLS]what is this"]),
    (
        "pythonic",
        "[get_weather(city=\"P, ')'\", days=-2), now()]",
        [("get_weather", '{"city": "P, \')\'", "days": -2}'), ("now", "{}")],
    ),
    ("pythonic", "[get_weather(days=+2)]", [("get_weather", '{"days": 2}')]),
    ("pythonic", '[get_weather("Paris")]', [("get_weather", PARIS)]),
    ("pythonic", "[link](http://x) hi", ["[link](http://x) hi"]),
    ("pythonic", "[get_weather(city=open('x'))]", ["[get_weather(city=open('x'))]"]),
    ("llama4", "<|python_start|>[now()]<|python_end|>", [("now", "{}")]),
    (
        "gemma",
        'Sure.\n```tool_code\nprint(get_weather(city="a\nb", days={"x": [True, None]}))\n```\n',
        ["Sure.", ("get_weather", '{"city": "a\\nb", "days": {"x": [true, null]}}')],
    ),
    ("json", '{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", '{"a": 1}')]),
    ("json", '```json\n[{"name": "now", "arguments": {}}]\n```', [("now", "{}")]),
    ("json", "[1, 2, 3]", ["[1, 2, 3]"]),
    ("json", ALICE, [ALICE]),
    ("json", f"Here:\n\n{ALICE}\nThat is all.", [f"Here:\n\n{ALICE}\nThat is all."]),
    ("json", '```json\n{"arguments": {}, "name": "Alice"}\n```', ['```json\n{"arguments": {}, "name": "Alice"}\n```']),
    ("json", '```json\n{"function": {"name": "x"}}\n```', ['```json\n{"function": {"name": "x"}}\n```']),
    ("json", "```json\n[1, 2]\n```", ["```json\n[1, 2]\n```"]),
    ("json", f'{ALICE}\n\n```json\n{{"name": "now", "arguments": {{}}}}\n```', [ALICE, ("now", "{}")]),
    ("json", f'```json\n{{"name": "now"}}\n```\n{ALICE}', [("now", "{}"), f"\n{ALICE}"]),
    (
        "json",
        '```json\n[{"name": "now", "arguments": {}}, {"name": "Alice"}]\n```',
        [("now", "{}"), ', {"name": "Alice"}]\n```'],
    ),
    ("jamba", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', [("now", "{}")]),
    ("phi4", 'functools[{"name": "now", "arguments": {}}]', [("now", "{}")]),
    (
        "deepseek_v3",
        (
            "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ["Let me see.", ("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "deepseek_v31",
        (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜> Done."
        ),
        [("get_weather", ROME), ("now", "{}"), " Done."],
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>hm", ["<｜tool▁calls▁begin｜>hm"]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁cut",
        [("now", "{}"), "<｜tool▁cut"],
    ),
    (
        "deepseek_v32",
        (
            '<D>function_calls>\n<D>invoke name="get_weather">\n<D>parameter name="city" string="true">Paris'
            '</D>parameter>\n</D>invoke>\n<D>invoke name="now">\n</D>invoke>\n</D>function_calls>'
        ).replace("D>", "｜DSML｜"),
        [("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "kimi_k2",
        (
            f"Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ROME}"
            "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        ["Hm.", ("get_weather", ROME), ("now", "{}")],
    ),
    (
        "qwen3_coder",
        (
            "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
            "[1, true]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        ["I look.", ("get_weather", '{"city": "Paris", "days": [1, true]}'), ("now", "{}")],
    ),
    (
        "qwen3_coder",
        '<function=get_weather>\n<parameter=city>\na "b"\n\n2 < 3 </p>\n</parameter>\n</function>\n</tool_call> ok',
        [("get_weather", '{"city": "a \\"b\\"\\n\\n2 < 3 </p>"}'), " ok"],
    ),
    ("qwen3_coder", "The tag <function=other> is text.", ["The tag <function=other> is text."]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [("get_weather", '{"city": "Par', "cut")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>True</parameter><parameter=b>x y</parameter></function></tool_call>",
        [("f", '{"a": true, "b": "x y"}')],
    ),
    (
        "glm45",
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>42</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
        ),
        [("get_weather", '{"city": "42", "days": 42}'), ("now", "{}")],
    ),
    (
        "glm45",
        "Hi\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        ["Hi", ("get_weather", '{"city": "Rome"}')],
    ),
    (
        "solar_open2",
        (
            "Hm.<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>a <|b<|tool_arg:end|>\n"
            "<|tool_arg:start|>days<|tool_arg:value|>42<|tool_arg:end|>\n<|tool_call:end|>\n"
            "<|tool_call:start|>now\n<|tool_call:end|>"
        ),
        ["Hm.", ("get_weather", '{"city": "a <|b", "days": 42}'), ("now", "{}")],
    ),
    (
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
            '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
        ),
        [("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        [("get_weather", PARIS)],
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [("now", "{}")],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>Ok',
        [("get_weather", PARIS), ("now", "{}"), "Ok"],
    ),
    (
        "olmo3",
        '<function_calls>\nget_weather(city="Paris")\nnow()\n</function_calls>',
        [("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "deepseek_v4",
        (
            '<D>tool_calls>\n<D>invoke name="get_weather">\n<D>parameter name="city" string="true">Paris'
            "</D>parameter>\n</D>invoke>\n</D>tool_calls>"
        ).replace("D>", "｜DSML｜"),
        [("get_weather", PARIS)],
    ),
    (
        "step3",
        (
            "Hm.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="get_weather">\n'
            '<steptml:parameter name="city">a < b</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke>'
            "<｜tool_call_end｜>\n"
            "<｜tool_calls_end｜>"
        ),
        ["Hm.", ("get_weather", '{"city": "a < b"}'), ("now", "{}")],
    ),
    (
        "hy_v3",
        (
            "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Paris</arg_value>"
            "</tool_call>\n"
            "<tool_call>now<tool_sep></tool_call></tool_calls>"
        ),
        [("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "minicpm5",
        (
            'Head\n<function name="get_weather"><param name="city">Paris</param></function>\n'
            '<function name="now"></function>'
        ),
        ["Head", ("get_weather", PARIS), ("now", "{}")],
    ),
    ("minicpm5", 'The tag <function name="x"> is text.', ['The tag <function name="x"> is text.']),
    (
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Rome", "days": 2}}, {"now": {}}]<|tools_suffix|>',
        [("get_weather", ROME), ("now", "{}")],
    ),
    ("apertus", '<|tools_prefix|>[{"now": 5}]', ['<|tools_prefix|>[{"now": 5}]']),
    (
        "gigachat3",
        f'function call<|role_sep|>\n{{"name": "get_weather", "arguments": {PARIS}}}',
        [("get_weather", PARIS)],
    ),
    ("gigachat3", '<|function_call|>{"name": "now", "arguments": {}}', [("now", "{}")]),
    (
        "gemma4",
        (
            'I look. <|tool_call>call:get_weather{city:<|"|>Paris, {"x"}<|"|>,days:{a:[1,true,<|"|>}<|"|>]}}'
            "<tool_call|>"
            "<|tool_call>call:now{}<tool_call|>"
        ),
        ["I look.", ("get_weather", '{"city": "Paris, {\\"x\\"}", "days": {"a": [1, true, "}"]}}'), ("now", "{}")],
    ),
    ("gemma4", '<|tool_call>call:now{a:"x}\\\\",b:null}<tool_call|>', [("now", '{"a": "x}\\\\", "b": null}')]),
    ("gemma4", "<|tool_call>hello<tool_call|>", ["<|tool_call>hello<tool_call|>"]),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        [("get_weather", PARIS)],
    ),
    ("granite_20b", f'<function_call> {{"name": "get_weather", "arguments": {PARIS}}}', [("get_weather", PARIS)]),
]

HARMONY: list[tuple[str, list[object]]] = [
    (
        "<|channel|>analysis<|message|>Hm <|x.<|end|><|start|>assistant<|channel|>final<|message|>Forty-two.<|return|>",
        [("think", "Hm <|x."), "Forty-two."],
    ),
    (
        (
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
        ),
        [("think", "Look."), ("get_weather", PARIS)],
    ),
    (
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|> {ROME}",
        [("get_weather", ROME)],
    ),
    (
        (
            "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.now<|message|><|call|>"
        ),
        ["I will look.", ("now", "{}")],
    ),
    ("<|channel|>final<|message|>Yes", ["Yes"]),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", [("think", "a\nb")]),
    ('<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": [', [("now", '{"a": [', "cut")]),
    (
        "<|channel|>commentary to=functions.now<|message|>{x}<|call|>",
        [("now", "{", "cut"), "x}"],
    ),
    (
        '<|channel|>commentary to=functions.now<|message|>"a b"<|call|>',
        [("now", "", "cut"), '"a b"'],
    ),
    (
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}<|call|>",
        [("get_weather", PARIS)],
    ),
    ("No channel < at all", ["No channel < at all"]),
    ("No head<|message|>but text", ["No head<|message|>but text"]),
    ("to=all of you", ["to=all of you"]),
    (f"<|start|>{'x' * 1100}<|message|>y", [f"<|start|>{'x' * 1100}<|message|>y"]),
    ("<|channel|>fin", []),
    ("", []),
]


def folded(events: list[AnswerEvent]) -> list[object]:
    """Events as texts, ("think", text) and (name, arguments); a call that is not complete ends with "cut"."""
    found: list[object] = []
    open_call: list[str] | None = None
    for event in events:
        if isinstance(event, CallStart):
            assert open_call is None
            open_call = [event.call.name, ""]
        elif isinstance(event, CallArguments):
            assert open_call is not None
            open_call[1] += event.text
        elif isinstance(event, CallEnd):
            assert open_call is not None
            assert event.call.arguments == open_call[1]
            found.append((*open_call,) if event.call.is_complete else (*open_call, "cut"))
            open_call = None
        elif isinstance(event, ReasoningSaid):
            before = found.pop()[1] if found and isinstance(found[-1], tuple) and found[-1][0] == "think" else ""
            found.append(("think", before + event.text))
        else:
            assert isinstance(event, TextSaid)
            found.append(found.pop() + event.text if found and isinstance(found[-1], str) else event.text)
    assert open_call is None
    return found


def parsed(form: AnswerForm, pieces: list[str], *, is_cut: bool = False) -> list[object]:
    parser = answer_parser(form)
    events = [event for piece in pieces for event in parser.push(piece)]
    return folded(events + parser.finish(is_cut=is_cut))


@pytest.mark.parametrize(("name", "text", "expected"), ANSWERS)
@pytest.mark.parametrize("thought", ["", "<think>\nHm <tool_call>\n</think>\n\n"])
def test_every_cut_gives_the_same(name: str, text: str, expected: list[object], thought: str) -> None:
    form = AnswerForm(FORMATS[name], FUNCTIONS, REASONING["think"])
    answer = thought + text
    whole = parsed(form, [answer])
    assert whole == ([("think", "Hm <tool_call>")] if thought else []) + expected
    assert parsed(form, list(answer)) == whole
    for place in range(1, len(answer)):
        assert parsed(form, [answer[:place], answer[place:]]) == whole


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_channels_at_every_cut(text: str, expected: list[object]) -> None:
    form = AnswerForm(FORMATS["harmony"], FUNCTIONS, REASONING["harmony"])
    assert parsed(form, [text]) == expected
    assert parsed(form, list(text)) == expected
    for place in range(1, len(text)):
        assert parsed(form, [text[:place], text[place:]]) == expected


@given(st.sampled_from(ANSWERS), st.sampled_from(ANSWERS), st.lists(st.integers(0, 400), max_size=6))
def test_joined_answers_of_a_format_are_cut_anywhere(one: tuple, other: tuple, places: list[int]) -> None:  # type: ignore[type-arg]
    form = AnswerForm(FORMATS[one[0]], FUNCTIONS, REASONING["think"])
    answer = one[1] + other[1]
    cuts = sorted({0, len(answer), *(place % (len(answer) + 1) for place in places)})
    assert parsed(form, [answer[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]) == parsed(form, [answer])


@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet='<tool_ca>{}[]"name:,get_weather() \n\\', max_size=60))
def test_noise_is_never_lost(name: str, text: str) -> None:
    """Without a call, the text comes out as it went in."""
    form = AnswerForm(FORMATS[name], FUNCTIONS)
    found = parsed(form, list(text))
    if all(isinstance(part, str) for part in found):
        assert "".join(map(str, found)) == text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_written_is_read(name: str) -> None:
    calls = [("get_weather", {"city": 'a "b" é\n', "days": [1, None, True]}), ("now", {})]
    written = write_calls(FORMATS[name], calls)
    found = parsed(AnswerForm(FORMATS[name], FUNCTIONS), list(written))
    assert [(part[0], json.loads(part[1])) for part in found] == calls  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("is_forced", [True, False])
def test_the_token_limit_leaves_no_part_of_a_call_as_text(name: str, is_forced: bool) -> None:
    """Wherever calls are cut, what comes out are calls, of which the last one may be incomplete."""
    calls = [("get_weather", {"city": 'a "b"', "days": [1, None]}), ("get_weather", {"city": "<"}), ("now", {})]
    written = write_calls(FORMATS[name], calls)
    form = AnswerForm(FORMATS[name], FUNCTIONS, is_forced=is_forced)
    for place in range(1, len(written)):
        found = parsed(form, [written[:place]], is_cut=True)
        if is_forced or len(found) > 1:
            assert all(isinstance(part, tuple) for part in found), written[:place]
        whole = [part for part in found if len(part) == 2 and isinstance(part, tuple)]  # type: ignore[arg-type]
        assert [(part[0], json.loads(part[1])) for part in whole] == calls[: len(whole)]
        assert len(found) - len(whole) <= 1
        assert found == parsed(form, list(written[:place]), is_cut=True)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "2 <", ["2 <"]),
        ("hermes", 'Hm. <tool_call>{"na', ["Hm."]),
        ("hermes", '<tool_call>{"name": "now", "arg', [("now", "", "cut")]),
        ("hermes", f'<tool_call>{{"name": "now", "arguments": {PARIS}', [("now", PARIS, "cut")]),
        ("llama3", '{"name": "now", "par', ['{"name": "now", "par']),
        ("json", '```json\n{"na', ['```json\n{"na']),
        ("json", '```json\n{"name": "now", "arguments": {"a', [("now", '{"a', "cut")]),
        ("json", '```json\n{"name": "now"}\n```\n\n```json\n{"a', [("now", "{}"), '\n\n```json\n{"a']),
        ("json", '{"name": "now"}, {"na', [("now", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, ', [("now", "{}")]),
        ("lfm2", "<|tool_call_start|>[now(), get_weather(city='P", [("now", "{}"), ("get_weather", "", "cut")]),
    ],
)
def test_an_answer_cut_by_the_token_limit(name: str, text: str, expected: list[object]) -> None:
    assert parsed(AnswerForm(FORMATS[name], FUNCTIONS), [text], is_cut=True) == expected


HALF, PAIR = r"\ud83d", r"\ud83d\ude00"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": "{HALF}x{PAIR}"}}}}'),
        ("hermes", f'<tool_call>{{"arguments": {{"a": "{HALF}x{PAIR}"}}, "name": "now"}}'),
        ("mistral", f'[TOOL_CALLS]now[ARGS]{{"a": "{HALF}x{PAIR}"}}'),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{"a":"%sx%s"}'),
        ("pythonic", f'[now(a="{HALF}x{PAIR}")]'),
        ("gemma4", f'<|tool_call>call:now{{a:"{HALF}x{PAIR}"}}<tool_call|>'),
        ("harmony", f'<|channel|>commentary to=functions.now<|message|>{{"a": "{HALF}x{PAIR}"}}<|call|>'),
        ("qwen3_coder", '<tool_call><function=now><parameter=a>["%sx%s"]</parameter></function></tool_call>'),
    ],
)
def test_half_a_surrogate_pair_is_replaced(name: str, text: str) -> None:
    """Clients cannot read an escape of half a pair; a whole pair is one character in every format."""
    text = text % (HALF, PAIR) if "%s" in text else text
    [(_, arguments)] = parsed(AnswerForm(FORMATS[name], FUNCTIONS), list(text))  # type: ignore[misc]
    assert json.loads(arguments.encode())["a"] in ("\ufffdx\U0001f600", ["\ufffdx\U0001f600"])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", f'<tool_call>{{"name": "no{HALF}w", "arguments": {{}}}}', None),
        ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "now"}', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": NaN}"}', None),
        (
            "qwen3_coder",
            "<tool_call><function=now><parameter=a>1e999</parameter></function></tool_call>",
            [("now", '{"a": "1e999"}')],
        ),
    ],
)
def test_what_json_cannot_hold_is_no_value(name: str, text: str, expected: list[object] | None) -> None:
    assert parsed(AnswerForm(FORMATS[name], FUNCTIONS), list(text)) == (expected or [text])


# ── reasoning ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\na\n</think>\n\nb", False, [("think", "a"), "b"]),
        ("a\nb</think>c", True, [("think", "a\nb"), "c"]),
        ("<think>a</think>b", True, [("think", "a"), "b"]),
        ("<think>a </thin", False, [("think", "a </thin")]),
        ("no <think>", False, ["no <think>"]),
        ("<think></think>x", False, ["x"]),
        ("a", True, [("think", "a")]),
        ("<thi", False, ["<thi"]),
        (" \n", False, [" \n"]),
    ],
)
def test_reasoning_is_split_at_every_cut(text: str, is_open: bool, expected: list[object]) -> None:
    form = AnswerForm(reasoning=REASONING["think"], is_reasoning_open=is_open)
    assert parsed(form, [text]) == expected
    assert parsed(form, list(text)) == expected
    for place in range(1, len(text)):
        assert parsed(form, [text[:place], text[place:]]) == expected


def test_reasoning_of_gemma() -> None:
    text = "<|channel>thought\nHm.\n<channel|>Yes."
    form = AnswerForm(reasoning=REASONING["gemma4"])
    assert "<|channel>" in form.markers
    for place in range(len(text)):
        assert parsed(form, [text[:place], text[place:]]) == [("think", "Hm."), "Yes."]


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), _VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_scanner_agrees_with_json(value: dict[str, object], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    scanner = JsonScanner()
    for place, char in enumerate(text):
        assert scanner.feed(char)
        assert scanner.is_done == (place == len(text) - 1)


@given(st.text(alphabet='{}[]",:1-.e+truefalsn \\u', max_size=24))
def test_scanner_refuses_what_json_refuses(text: str) -> None:
    scanner = JsonScanner()
    is_valid = all(scanner.feed(char) for char in text) and scanner.is_done
    try:
        json.loads(text)
    except ValueError:
        assert not is_valid
    else:
        assert is_valid or not isinstance(json.loads(text), (dict, list))


@given(st.dictionaries(st.text(max_size=5), _VALUES, max_size=4), st.integers(0, 200))
def test_a_cut_object_can_be_closed(value: dict[str, object], place: int) -> None:
    text = json.dumps(value)
    closed = json.loads(close_partial(text[:place]))
    assert isinstance(closed, dict)
    if place >= len(text):
        assert closed == value


def test_arguments_as_text_that_nest_too_deep_are_no_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": "%s"}</tool_call>' % ("[" * 100_000)
    assert parsed(AnswerForm(FORMATS["hermes"], FUNCTIONS), [text]) == [text]
