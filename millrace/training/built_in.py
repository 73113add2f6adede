"""The built-in prompts: forms that are filled with topics, one item per line."""

from __future__ import annotations

from itertools import product

from millrace.training.prompts import TrainingPrompt

_QUESTIONS = """\
Explain {0} to a ten-year-old.
What are the three most important facts about {0}?
Write a short dialogue between a teacher and a student about {0}.
Give me a step-by-step introduction to {0}.
What do people often get wrong about {0}?
Write a short email inviting a friend to a talk about {0}.
Write a poem of eight lines about {0}.
Compare {0} with something from everyday life.
"""
_TOPICS = """\
the water cycle
photosynthesis
compound interest
the French Revolution
black holes
vaccines
supply and demand
plate tectonics
the Roman Empire
how batteries work
jazz music
chess openings
healthy sleep
electric cars
the human heart
machine learning
coral reefs
renewable energy
the printing press
time management
bread baking
the immune system
democracy
volcanoes
"""
_CODE = """\
Write a Python function that {0}.
Write a JavaScript function that {0}, with comments.
Write a Python function that {0}, and three tests for it.
Explain line by line a Python function that {0}.
"""
_FUNCTIONS = """\
reverses a string
checks whether a number is prime
merges two sorted lists
counts words in a text
finds the largest element of a list
computes the factorial of a number
removes duplicates from a list
checks whether a word is a palindrome
converts Celsius to Fahrenheit
computes Fibonacci numbers
sorts a list with bubble sort
searches a sorted list with binary search
flattens a nested list
counts the vowels of a string
computes the greatest common divisor
validates an email address
"""
_JSON = """\
Write a JSON object that describes {0}. Answer with JSON only.
Write a JSON array of three examples of {0}. Answer with JSON only.
Write a JSON schema for {0}, then one example.
"""
_RECORDS = """\
a book with title, author, year and price
a user with name, email and age
a city with country and population
an order with items, quantities and a total
a film with director, year and genres
a recipe with ingredients
a weather report with temperature and wind
a bank account with owner and balance
a song with artist and length
a flight with departure, arrival and seats
a product with name, stock and price
a meeting with time and guests
"""
_SUMMARIES = """\
Summarise this text in one sentence:
Summarise this text in three bullet points:
Write a headline and a short summary of this text:
Which facts does this text give? List them.
Rewrite this text in simpler words:
"""
_PASSAGES = """\
The committee met on Monday to discuss the new library. Several members asked for longer opening hours, while
others were worried about the cost. In the end they agreed to open on Sundays for a trial of six months. A report
will be written in spring, and the public will be asked for its opinion.

Bees are among the most important pollinators. A third of the food that people eat depends on them. In recent years
their number has fallen because of pesticides, disease and the loss of wild flowers. Farmers have started to plant
strips of flowers along their fields, and cities keep hives on roofs.

The company reported sales of 4.2 million dollars for the third quarter, an increase of eight percent over last
year. Profit fell slightly because of higher prices for energy and transport. The management expects the fourth
quarter to be better, since two new products will be on sale before the holidays.

Anna wanted to learn the violin, but her family could not pay for lessons. An old neighbour who had once played in
an orchestra offered to teach her for nothing. Every evening they practised in his kitchen. Five years later she
was admitted to the conservatory, and he sat in the first row at her first concert.

Water boils at a lower temperature on a mountain because the air pressure is lower. This is why pasta takes longer
to cook there. A pressure cooker does the opposite: it raises the pressure, so that water boils above one hundred
degrees and food is done sooner.

The bridge was closed on Friday after engineers found cracks in two of its pillars. About thirty thousand cars use
it every day. Drivers have to take the tunnel in the north, and buses leave every ten minutes. The repair will take
at least four weeks and cost nine hundred thousand euros.
"""


def built_in_prompts() -> list[TrainingPrompt]:
    passages = [" ".join(passage.split()) for passage in _PASSAGES.split("\n\n")]
    groups = (
        ("chat", _QUESTIONS, _TOPICS.splitlines()),
        ("code", _CODE, _FUNCTIONS.splitlines()),
        ("summary", _SUMMARIES, passages),
        ("json", _JSON, _RECORDS.splitlines()),
    )
    return [
        TrainingPrompt(
            (("user", form.format(filling) if "{0}" in form else f"{form}\n\n{filling}"),), workload=workload
        )
        for workload, forms, fillings in groups
        for form, filling in product(forms.splitlines(), fillings)
    ]


def _filled(form: str, filling: str) -> str:
    return form.format(filling) if "{0}" in form else f"{form}\n\n{filling}"
