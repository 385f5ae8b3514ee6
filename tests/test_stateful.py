"""Any sequence of calls: each answer is right and nothing else changes, whatever came before, failures included."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import relpos_np as rp
from relpos_np import layers, testing
from relpos_np.testing.arguments import arguments, rebuilt
from relpos_np.testing.example import Example

SCHEMES = [name for name, info in rp.SCHEMES.items() if info.kind == "attention"]
BACKENDS = rp.backend.HOST_BACKENDS
seeds = st.integers(0, 5)
backends = st.sampled_from(BACKENDS)


def legacy_state():
    """Of the random numbers that a whole process shares; nobody here may use them."""
    return np.random.get_state()  # noqa: NPY002


def tables(position):
    """The scheme's arrays by name."""
    return {key: x for key, x in arguments(position).items() if isinstance(x, np.ndarray)}


class Call:
    """Arguments of attention, and what they are at the moment, kept apart."""

    def __init__(self, one):
        self.name, self.variant, self.kwargs, self.position = one.name, one.variant, dict(one.kwargs), one.position
        self.q, self.k, self.v = one.q, one.k, one.v
        self.remember()

    def remember(self):
        """From now on these numbers are right."""
        kept = {key: x.copy() if isinstance(x, np.ndarray) else x for key, x in self.kwargs.items()}
        held = [x.copy() for x in (self.q, self.k, self.v)]
        self.right = Example(self.name, self.variant, *held, rebuilt(self.position, self.q.dtype), kept)

    def assert_unchanged(self):
        """Nobody wrote to an argument."""
        for name in "qkv":
            np.testing.assert_array_equal(getattr(self, name), getattr(self.right, name))
        for key, x in self.right.kwargs.items():
            np.testing.assert_array_equal(self.kwargs[key], x)
        for key, x in tables(self.right.position).items():
            np.testing.assert_array_equal(tables(self.position)[key], x)

    def run(self, **more):
        return rp.attention(self.q, self.k, self.v, position=self.position, return_lse=True, **self.kwargs, **more)


class Decoder:
    """A layer, its cache, the tokens it has seen and those answers."""

    def __init__(self, seed, position):
        rng = np.random.default_rng(seed)
        weights = rng.standard_normal((4, 6, 6)) / 2
        self.layer = layers.MultiHeadAttention(*weights, heads=2, position=position)
        self.cache, self.rng = layers.Cache(), rng
        self.seen, self.answers = np.zeros((1, 0, 6)), np.zeros((1, 0, 6))


def bad_calls(call):
    """Calls that must be refused."""
    q, k, v, position = call.q, call.k, call.v, call.position
    return {
        "shapes": lambda: rp.attention(q, k[..., :-1], v, position=position),
        "dtypes": lambda: rp.attention(q, k.astype(np.int64), v),
        "ranks": lambda: rp.attention(q[0, 0, 0], k, v),
        "backend": lambda: rp.attention(q, k, v, position=position, backend="none"),
        "set_backend": lambda: rp.set_backend("none"),
        "use_backend": lambda: rp.use_backend("none").__enter__(),
        "out": lambda: rp.attention(q, k, v, position=position, out=q),
        "read-only out": lambda: rp.attention(
            q, k, v, out=np.broadcast_to(q.dtype.type(0), (*q.shape[:-1], v.shape[-1]))
        ),
        "mask": lambda: rp.attention(q, k, v, mask=np.ones((99, 98), bool)),
        "position": lambda: rp.attention(q, k, v, position="t5"),
        "window": lambda: rp.attention(q, k, v, window=(-1, 2)),
        "dropout": lambda: rp.attention(q, k, v, dropout=0.5),
        "logits": lambda: rp.logits(q, k[:, :0], position=position),
        "gradient": lambda: rp.attention_vjp(q, k, v, grad_out=q[..., :0], position=position),
        "shift": lambda: rp.rel_shift(q, variant="none"),
        "table": lambda: rp.T5(np.ones((3, 3, 3))),
        "weights": lambda: layers.tensors("nowhere.safetensors"),
    }


BAD = tuple(bad_calls(type("Any", (), dict.fromkeys("qkv", np.ones((1, 1, 1, 1))) | {"position": None})))


class Machine(RuleBasedStateMachine):
    calls = Bundle("calls")
    decoders = Bundle("decoders")

    @initialize()
    def look_around(self):
        self.everything, self.kept, self.buffers, self.chosen = [], [], {}, None
        rp.set_backend(None)
        self.errors, self.filters, self.random = np.geterr(), list(warnings.filters), legacy_state()

    def teardown(self):
        rp.set_backend(None)

    @rule(target=calls, name=st.sampled_from(SCHEMES), dtype=st.sampled_from(["float32", "float64"]), seed=seeds)
    def make(self, name, dtype, seed):
        size = "small" if name in ("window", "swin_v2") else "tiny"
        call = Call(testing.example(name, dtype=dtype, seed=seed, size=size))
        self.everything.append(call)
        return call

    @rule(target=calls, call=calls, how=st.sampled_from(["pickle", "deepcopy", "copy", "rebuilt"]))
    def duplicate(self, call, how):
        """A copy of a scheme gives the same bits."""
        ways = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy}
        other = copy.copy(call)
        other.position = ways.get(how, lambda x: rebuilt(x, call.q.dtype))(call.position)
        assert repr(other.position) == repr(call.position)
        for found, expected in zip(other.run(), call.run(), strict=True):
            np.testing.assert_array_equal(found, expected)
        if how == "copy":  # it shares the tables, which another rule may change
            return call
        other.kwargs, (other.q, other.k, other.v) = copy.deepcopy((call.kwargs, (call.q, call.k, call.v)))
        self.everything.append(other)
        return other

    @rule(call=calls, backend=st.none() | backends)
    def attend(self, call, backend):
        out, lse = call.run(backend=backend)
        assert call.right.error(out, lse) <= 1, call.right.where
        for found, first in zip(call.run(backend=backend), (out, lse), strict=True):
            np.testing.assert_array_equal(found, first)
        self.kept = [*self.kept[-5:], (out, out.copy()), (lse, lse.copy())]

    @rule(call=calls, backend=backends)
    def attend_into_an_array_that_is_used_again(self, call, backend):
        expected, _ = call.run(backend=backend)
        into = self.buffers.setdefault((expected.shape, expected.dtype), np.full_like(expected, np.nan))
        out, _ = call.run(backend=backend, out=into)
        assert out is into
        np.testing.assert_array_equal(out, expected)

    @rule(call=calls, backend=backends)
    def scores(self, call, backend):
        found = rp.logits(call.q, call.k, position=call.position, backend=backend, **call.kwargs)
        q, k = (x.astype(np.float64) for x in (call.right.q, call.right.k))
        expected = rp.logits(q, k, position=call.right.position, backend="numpy", **call.right.kwargs)
        slack = testing.tolerance(call.q.dtype, logit_bound=call.right.logit_bound, depth=call.right.products)
        assert testing.compare.ratio(found, expected, slack) <= 1

    # -------------------------------------------------------------------------------------- what is changed on purpose

    @rule(call=calls, seed=seeds)
    def change_a_table(self, call, seed):
        """A scheme reads the caller's arrays: the next call sees the new numbers."""
        held = {key: x for key, x in tables(call.position).items() if x.dtype.kind == "f" and x.flags.writeable}
        held = {key: x for key, x in held.items() if key not in ("a", "b", "frequencies", "logit_scale")}
        for x in held.values():
            x.flat[seed % x.size] += 0.25
        call.remember()
        for other in self.everything:
            if other.position is call.position and other is not call:
                other.remember()

    @rule(call=calls, which=st.sampled_from("qkv"))
    def change_an_input(self, call, which):
        """What was returned before is the caller's own."""
        out, lse = call.run()
        before = out.copy(), lse.copy()
        getattr(call, which)[...] *= -1
        for found, expected in zip((out, lse), before, strict=True):
            np.testing.assert_array_equal(found, expected)
        call.remember()

    @rule(call=calls)
    def change_a_result(self, call):
        """The caller may write to it."""
        for x in call.run():
            x[...] = np.nan
        assert call.right.error(*call.run()) <= 1

    # -------------------------------------------------------------------------------------- state that is asked for

    @rule(name=st.none() | backends)
    def choose(self, name):
        rp.set_backend(name)
        self.chosen = name

    @rule(call=calls, first=backends, second=backends)
    def choose_for_a_while(self, call, first, second):
        with rp.use_backend(first):
            expected = call.run()
            with rp.use_backend(second):
                assert rp.backend.current() == second
                with pytest.raises(rp.RelposError):
                    rp.attention(call.q, call.k, call.v, scale="no")
            with pytest.raises(rp.RelposError), rp.use_backend(second):
                bad_calls(call)["mask"]()
            assert rp.backend.current() == first
            for found, wanted in zip(call.run(), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)

    @rule(call=calls, words=st.sampled_from(BAD))
    def fail(self, call, words):
        with pytest.raises(rp.RelposError):
            bad_calls(call)[words]()

    @rule(call=calls, backend=backends)
    def fail_half_way(self, call, backend):
        """An error that is not the library's, from a scheme of the caller's."""

        class Broken(rp.Plain):
            def lower(self, *_):
                raise KeyError("broken")

            scores = transform = lower

        with pytest.raises(KeyError):
            rp.attention(call.q, call.k, call.v, position=Broken(), backend=backend)

    @rule(call=calls, backend=backends)
    def attend_in_threads(self, call, backend):
        expected = call.run(backend=backend)
        with ThreadPoolExecutor(3) as pool:
            for answer in pool.map(lambda _: call.run(backend=backend), range(6)):
                for found, wanted in zip(answer, expected, strict=True):
                    np.testing.assert_array_equal(found, wanted)

    # -------------------------------------------------------------------------------------- decoding

    @rule(target=decoders, seed=seeds, name=st.sampled_from(["none", "alibi", "t5", "shaw", "rotary"]))
    def start_decoding(self, seed, name):
        rng = np.random.default_rng(seed)
        return Decoder(
            seed,
            {
                "none": None,
                "alibi": rp.ALiBi(heads=2),
                "t5": rp.T5(rng.standard_normal((8, 2)), max_distance=9, bidirectional=False),
                "shaw": rp.Shaw(rng.standard_normal((5, 3)), rng.standard_normal((5, 3))),
                "rotary": rp.Rotary(dim=2),
            }[name],
        )

    @rule(decoder=decoders, tokens=st.integers(1, 3), backend=st.none() | backends)
    def decode(self, decoder, tokens, backend):
        x = decoder.rng.standard_normal((1, tokens, 6))
        before = x.copy()
        y = decoder.layer(x, cache=decoder.cache, causal=True, backend=backend)
        np.testing.assert_array_equal(x, before)
        decoder.seen = np.concatenate([decoder.seen, x], axis=1)
        decoder.answers = np.concatenate([decoder.answers, y], axis=1)
        assert len(decoder.cache) == decoder.seen.shape[1]
        whole = decoder.layer(decoder.seen, causal=True, backend="numpy")
        # Sums of six products, three times: a few hundred roundings of numbers below 20.
        np.testing.assert_allclose(decoder.answers, whole, rtol=0, atol=1e-12)

    @rule(decoder=decoders)
    def fail_to_decode(self, decoder):
        before = decoder.cache.key, decoder.cache.value
        for x in (np.ones((1, 1, 5)), np.ones((2, 1, 6), np.float32), np.ones((1, 1, 6), int)):
            with pytest.raises(rp.RelposError):
                decoder.layer(x, cache=decoder.cache, causal=True, window=-1)
        assert decoder.cache.key is before[0]
        assert decoder.cache.value is before[1]

    @rule(target=decoders, decoder=decoders, how=st.sampled_from(["pickle", "deepcopy"]))
    def branch(self, decoder, how):
        """From here on two texts are decoded, of which neither sees the other's tokens."""
        return copy.deepcopy(decoder) if how == "deepcopy" else pickle.loads(pickle.dumps(decoder))

    # -------------------------------------------------------------------------------------- what never changes

    @invariant()
    def nothing_else_has_changed(self):
        assert np.geterr() == self.errors
        assert warnings.filters == self.filters
        assert all(np.array_equal(a, b) for a, b in zip(legacy_state(), self.random, strict=True))
        assert rp.backend.current() == (self.chosen or rp.backend.DEFAULT)
        for call in self.everything:
            call.assert_unchanged()
        for x, right in self.kept:
            np.testing.assert_array_equal(x, right)


def test_some_sequences_of_calls():
    run_state_machine_as_test(Machine, settings=settings(max_examples=20, stateful_step_count=20))


@pytest.mark.stress
def test_many_sequences_of_calls():
    run_state_machine_as_test(Machine, settings=settings(max_examples=150, stateful_step_count=40))
