"""Ids of two tokenisations are joined only where both have said the same."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract import Ids
from hpcroll.gateway.tokens.splice import splice
from tests.token_families import family, resplit

seeded = settings(derandomize=True, deadline=None, max_examples=300)
words = st.lists(
    st.sampled_from(["Grüße", " 你好", " the", " file", "\n", "<|im_end|>", "<think>", "x", "\U0001f600"]),
    max_size=12,
).map("".join)


def array(ids: list[int]) -> Ids:
    return np.array(ids, dtype=np.uint32)


def control_of(ids: list[int]) -> list[int]:
    return [token for token in ids if token in family("qwen3").tokenizer.control_ids]


@seeded
@given(before=words, left=words, right=words, seed=st.integers(0, 99), data=st.data())
def test_what_is_joined_says_what_was_rendered(
    before: str, left: str, right: str, seed: int, data: st.DataObject
) -> None:
    renderer, random = family("qwen3"), Random(seed)
    encode, decode = renderer.tokenizer.encode, renderer.tokenizer.decode
    recorded = resplit(renderer, encode(before) + encode(left), random)
    rendered = resplit(renderer, encode(before) + encode(right), random, share=0.2)
    edges = (
        sorted(data.draw(st.lists(st.integers(0, len(recorded)), min_size=2, max_size=4, unique=True)))
        if len(recorded) > 3
        else []
    )
    runs = list(zip(edges[::2], edges[1::2], strict=False))
    joined = splice(array(recorded), array(rendered), renderer.tokenizer, runs).tolist()
    assert decode(joined) == decode(rendered)
    assert control_of(joined) == control_of(rendered)
    if joined != rendered:
        kept = next(
            (at for at, pair in enumerate(zip(joined, recorded, strict=False)) if pair[0] != pair[1]),
            min(len(joined), len(recorded)),
        )
        # It takes more of the record than the two had in common, up to a place outside of every run:
        # what follows is the rendered rest, which may begin like the record by chance.
        places = [at for at in range(1, kept + 1) if not any(start < at < end for start, end in runs)]
        assert any(rendered[len(rendered) - (len(joined) - at) :] == joined[at:] for at in places)


def test_the_whole_of_a_common_text_is_taken() -> None:
    renderer = family("qwen3")
    encode = renderer.tokenizer.encode
    text = encode("<|im_start|>user\nGrüße, count the files.<|im_end|>\n")
    recorded = resplit(renderer, text, Random(1))
    rendered = [*text, *encode("more")]
    assert recorded != text
    joined = splice(array([*recorded, *encode("less")]), array(rendered), renderer.tokenizer, [])
    assert joined.tolist() == [*recorded, *encode("more")]


def test_a_control_token_is_never_taken_for_its_spelling() -> None:
    renderer = family("qwen3")
    encode, guard = renderer.tokenizer.encode, renderer.tokenizer.guard
    recorded, rendered = encode("a<|im_end|>b"), encode(guard("a<|im_end|>b"))
    assert renderer.tokenizer.decode(recorded) == renderer.tokenizer.decode(rendered)
    assert splice(array(recorded), array(rendered), renderer.tokenizer, []).tolist() == rendered
