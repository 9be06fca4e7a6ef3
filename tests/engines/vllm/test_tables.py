"""Test the module that replaces vLLM's own: its rotation is each method's, for each length."""

import pytest

pytest.importorskip("vllm")
import torch
from helpers.method_names import frequency_methods
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from rope_patch import Refused
from rope_patch.serving import StackedRotary, read_request, rope_type_for

pytestmark = pytest.mark.engines

TRAINED, LONGEST, HEAD, THETA = 64, 256, 16, 1e4
STRETCH = [1 + 0.4 * pair for pair in range(HEAD // 2)]
OPTIONS = {
    "longrope": {"long_factor": STRETCH, "start_tokens": 4},
    "mixed-longrope": {"long_factor": STRETCH},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"factor": 1.0},
}
METHODS = frequency_methods()


@pytest.fixture(autouse=True)
def config():
    with set_current_vllm_config(VllmConfig()):
        yield


def make_rotary(name, is_neox=True, rotary_dim=HEAD, rows_per_token=1, **options):
    """Return the stacked module of a method."""
    options = {"factor": 4.0, **OPTIONS.get(name, {}), **options}
    parameters = {
        "rope_type": rope_type_for(name),
        "rope_theta": THETA,
        "original_max_position_embeddings": TRAINED,
        **options,
    }
    return StackedRotary(
        read_request(parameters),
        head_size=HEAD,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox,
        dtype=torch.float32,
        max_length=LONGEST,
        max_tokens=2 * LONGEST,
        rows_per_token=rows_per_token,
    )


def rotate(rotary, length, query):
    """Return queries at positions 0, 1, ... of a request of `length` tokens, rotated."""
    count = len(query)
    rotary.first_rows[:count] = rotary.first_row(length)
    flat = query.reshape(count, -1).clone()
    return rotary(torch.arange(count), flat, flat.clone())[0].reshape(query.shape)


def exact(query, inv_freq, attention_factor, is_neox):
    """Rotate in float64 by the formula of RoFormer."""
    angles = torch.arange(len(query), dtype=torch.float64)[:, None] * inv_freq
    rotation = torch.polar(torch.full_like(angles, attention_factor), angles)
    rotated = 2 * len(inv_freq)
    turned, rest = query.double()[..., :rotated], query.double()[..., rotated:]
    if is_neox:
        pairs = torch.complex(*turned.chunk(2, dim=-1)) * rotation[:, None]
        return torch.cat([pairs.real, pairs.imag, rest], -1)
    pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * rotation[:, None]
    return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_rotates_each_request_by_its_length(name, is_neox):
    rotary = make_rotary(name, is_neox)
    geometry = rotary.request.geometry(HEAD, HEAD)
    method = rotary.request.method
    start = method.start_token_count
    for length in (3, 40, TRAINED, TRAINED + 1, 100, 200, LONGEST):
        query = torch.randn(length, 2, HEAD)
        got = rotate(rotary, length, query).double()
        frequencies = method.frequencies_at(geometry, length)
        expected = exact(query, frequencies.inv_freq, frequencies.attention_factor, is_neox)
        if start:
            expected[:start] = exact(query[:start], geometry.inv_freq(), 1.0, is_neox)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_heads_rotate_in_part():
    rotary = make_rotary("dynamic-yarn", rotary_dim=HEAD // 2)
    query = torch.randn(100, 2, HEAD)
    frequencies = rotary.request.method.frequencies_at(
        rotary.request.geometry(HEAD, HEAD // 2), 100
    )
    expected = exact(query, frequencies.inv_freq, frequencies.attention_factor, True)
    torch.testing.assert_close(rotate(rotary, 100, query).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_of_several_positions_rotates_each_section_by_its_own(interleaved):
    options = {"mrope_section": [4, 2, 2], "mrope_interleaved": interleaved}
    rotary = make_rotary("dynamic-yarn", rows_per_token=4, **options)
    axis_of_pair = [0, 1, 2, 0, 1, 2, 0, 0] if interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    for length in (TRAINED, TRAINED + 1, 200, LONGEST):
        frequencies = rotary.request.method.frequencies_at(
            rotary.request.geometry(HEAD, HEAD), length
        )
        # A video's positions may be larger than its tokens are many.
        positions = torch.randint(0, 4 * length, (3, length))
        query = torch.randn(length, HEAD)
        rotary.first_rows[:length] = rotary.first_row(length)
        got, _ = rotary(positions, query.clone(), query.clone())
        angles = positions[axis_of_pair].T.double() * frequencies.inv_freq
        rotation = torch.polar(torch.full_like(angles, frequencies.attention_factor), angles)
        rotated = torch.complex(*query.double().chunk(2, dim=-1)) * rotation
        expected = torch.cat([rotated.real, rotated.imag], -1)
        torch.testing.assert_close(got.double(), expected, atol=5e-4, rtol=0)


def test_tokens_of_one_forward_have_rows_of_their_own():
    rotary = make_rotary("dynamic-yarn")
    lengths = [30, 100, 200, 64, 65]
    queries = [torch.randn(length, 2, HEAD) for length in lengths]
    alone = [rotate(rotary, length, query) for length, query in zip(lengths, queries, strict=True)]
    flat = torch.cat(queries).reshape(sum(lengths), -1)
    rotary.first_rows[: len(flat)] = torch.cat(
        [torch.full((length,), rotary.first_row(length)) for length in lengths]
    )
    positions = torch.cat([torch.arange(length) for length in lengths])
    together, _ = rotary(positions, flat, flat.clone())
    assert torch.equal(together.reshape(-1, 2, HEAD), torch.cat(alone))


def test_short_requests_have_the_bits_of_a_plain_server():
    rotary = make_rotary("dynamic-yarn")
    plain = RotaryEmbedding(HEAD, HEAD, LONGEST, THETA, True, torch.float32)
    query = torch.randn(TRAINED, 2 * HEAD)
    expected, _ = plain(torch.arange(TRAINED), query.clone(), query.clone())
    got = rotate(rotary, TRAINED, query.view(TRAINED, 2, HEAD))
    assert torch.equal(got.view(TRAINED, -1), expected)


def test_a_base_of_its_own_is_what_the_method_stretches():
    base = [1 / (THETA ** (pair / 8)) / (1 + pair / 4) for pair in range(8)]
    rotary = make_rotary("dynamic-linear", base_inv_freq=base)
    query = torch.randn(TRAINED, 2, HEAD)
    expected = exact(query, torch.tensor(base, dtype=torch.float64), 1.0, True)
    got = rotate(rotary, TRAINED, query).double()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_code_that_reads_the_table_itself_is_refused():
    with pytest.raises(Refused, match="reads the table of cos and sin itself"):
        _ = make_rotary("dynamic-yarn").cos_sin_cache
