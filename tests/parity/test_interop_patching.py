"""Patched models of transformers in several threads: a forward pass is all its own or all this library's."""

import copy
import inspect
import threading

import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

from relpos_np.interop.transformers import NAME, patch, patched, switch, unpatch, used  # noqa: E402
from tests.parity.small import generating, small  # noqa: E402

MODELS = pytest.mark.parametrize(
    ("name", "own"), [("T5", "eager"), ("T5", "sdpa"), ("MPNet", "eager"), ("Bloom", "eager")]
)
LAYERS = {"T5": 6, "T5Encoder": 2, "MPNet": 2, "Bloom": 2}
IDS = torch.arange(2, 26).reshape(2, 12)


def threads(calls):
    """Names of the threads that called this library's attention, one each time."""
    return [one.thread for one in calls]


def states(model):
    decoder = {"decoder_input_ids": IDS} if hasattr(model, "decoder") else {}
    with torch.no_grad():
        return model(IDS, **decoder).last_hidden_state


@MODELS
def test_patch_lasts_until_unpatch_in_every_thread(name, own, calls):
    model = small(name, own)
    before = {key: dict(vars(x)) for key, x in model.named_modules()}
    expected = states(model)
    assert used(model).here == ()
    assert patch(model) is model
    assert len(used(model).here) == LAYERS[name]
    found = []
    for run in range(2):
        thread = threading.Thread(target=lambda: found.append(states(model)), name=f"run {run}")
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)
    assert torch.equal(found[1], found[0])
    assert threads(calls) == ["run 0"] * LAYERS[name] + ["run 1"] * LAYERS[name]
    with pytest.raises(rp.RelposValueError, match=f"{name}Model is patched already"):
        patch(model)
    assert unpatch(model) is model
    assert torch.equal(states(model), expected)
    assert len(calls) == 2 * LAYERS[name]
    assert model.config._attn_implementation == own
    for key, x in model.named_modules():
        assert vars(x).keys() == before[key].keys(), key
    with pytest.raises(rp.RelposValueError, match=f"{name}Model is not patched"):
        unpatch(model)
    assert switch._switched == {}


@MODELS
def test_a_block_counts_for_its_own_thread(name, own, calls):
    model = small(name, own)
    expected = states(model)
    found = {}
    with patched(model):
        assert len(used(model).here) == LAYERS[name]
        found["inside"] = states(model)

        def other():
            found["used"] = used(model)
            found["outside"] = states(model)

        thread = threading.Thread(target=other, name="other")
        thread.start()
        thread.join()
        assert model.config._attn_implementation == NAME
    assert torch.equal(found["outside"], expected)
    assert found["used"].here == ()
    assert "other" not in threads(calls)
    assert len(calls) == LAYERS[name]
    torch.testing.assert_close(found["inside"], expected, rtol=0, atol=1e-5)


def test_blocks_of_two_threads_and_within_each_other(calls):
    model = small("MPNet")
    expected = states(model)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with patched(model):
            entered.set()
            leave.wait(60)
            states(model)

    thread = threading.Thread(target=other, name="other")
    with patched(model), patched(model):
        thread.start()
        entered.wait(60)
        states(model)
    # This thread's block has ended, the other's has not.
    assert torch.equal(states(model), expected)
    assert len(calls) == 2
    leave.set()
    thread.join()
    assert threads(calls[2:]) == ["other"] * 2
    assert torch.equal(states(model), expected)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("change", [patch, unpatch])
@pytest.mark.parametrize(
    ("name", "second"), [("MPNet", "encoder.layer.1"), ("T5Encoder", "encoder.block.1"), ("Bloom", "h.1")]
)
def test_a_pass_that_is_under_way_ends_as_it_began(name, second, change, calls):
    """The model is patched, or the patch taken back, while another thread stands before its second layer."""
    model = small(name)
    expected = states(model)
    if change is unpatch:
        patch(model)
    between, go_on, found = threading.Event(), threading.Event(), []

    def wait(*_):
        if threading.current_thread().name == "other":
            between.set()
            assert go_on.wait(60)

    hook = model.get_submodule(second).register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: found.append(states(model)), name="other")
    thread.start()
    assert between.wait(60)
    change(model)
    now = states(model)
    go_on.set()
    thread.join()
    hook.remove()
    if change is patch:
        assert torch.equal(found[0], expected)
        assert threads(calls) == ["MainThread"] * LAYERS[name]
        unpatch(model)
    else:
        assert torch.equal(now, expected)
        assert threads(calls) == ["other"] * LAYERS[name]
    assert [key for key, x in model.named_modules() if "forward" in vars(x)] == []
    assert switch._switched == {}


def test_many_threads_patch_and_run_one_model():
    model = small("T5")
    expected = states(model)
    worst, errors = [], []

    def work(seed):
        try:
            for turn in range(6):
                if (seed + turn) % 2:
                    with patched(model):
                        worst.append(float((states(model) - expected).abs().max()))
                else:
                    worst.append(float((states(model) - expected).abs().max()))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(worst) == 24
    assert max(worst) < 1e-5
    assert torch.equal(states(model), expected)
    assert switch._switched == {}


def test_a_copy_of_a_patched_model_is_its_own(calls):
    model = patch(small("MPNet"))
    expected = states(model)
    other = copy.deepcopy(model)
    unpatch(model)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    assert torch.equal(states(other), expected)
    assert len(calls) == 4
    unpatch(other)
    torch.testing.assert_close(states(other), expected, rtol=0, atol=1e-5)
    assert len(calls) == 4


def test_generation_sees_the_signature_of_a_patched_model():
    model, options = generating(transformers.T5ForConditionalGeneration)
    options["attention_mask"] = torch.ones_like(IDS)
    own, expected = inspect.signature(model.forward), model.generate(IDS, **options)
    patch(model)
    assert inspect.signature(model.forward) == own
    assert torch.equal(model.generate(IDS, **options), expected)


def test_a_method_that_somebody_else_replaced_stays():
    model = small("MPNet")
    attention = model.encoder.layer[0].attention.attn
    attention.forward = own = attention.forward
    with pytest.raises(rp.RelposValueError, match=r"MPNetSelfAttention\.forward of this model was replaced already"):
        patch(model)
    assert attention.forward is own
    assert model.config._attn_implementation == "eager"
    states(model)


def test_two_models_with_one_configuration():
    model = small("MPNet")
    other = transformers.MPNetModel(model.config).eval()
    with patched(model), pytest.raises(rp.RelposValueError, match="MPNetConfig is that of another model"):
        patch(other)
    patch(other)
    unpatch(other)
