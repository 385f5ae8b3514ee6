"""The text encoder of a trained VITS voice against onnxruntime on the published graph, and the speech it gives."""

import wave

import numpy as np
import pytest

import vits_speak
from networks import vits, weights

pytestmark = pytest.mark.models

HELLO = "həlˈoʊ wˈɜːld"
LONG = "ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ ðə lˈeɪzi dˈɑːɡ."


@pytest.fixture(scope="module")
def paths(needs):
    needs(weights.VOICE, ("onnx", "onnxruntime"))
    return weights.voice()


@pytest.fixture(scope="module")
def encoder(paths):
    return vits.TextEncoder(vits.initialisers(paths[0]))


@pytest.fixture(scope="module")
def published(paths):
    """``run(outputs, ids, lengths)``: those tensors of the voice's own graph."""
    import onnx
    import onnxruntime
    from onnx.utils import Extractor

    extractor = Extractor(onnx.load(paths[0]))

    def run(outputs, inputs):
        cut = extractor.extract_model(list(inputs), list(outputs))
        session = onnxruntime.InferenceSession(cut.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, inputs)

    return run


def batch(config, *texts):
    """Phonemes padded to the longest text."""
    rows = [vits.phoneme_numbers(text, config)[0] for text in texts]
    lengths = np.array([len(row) for row in rows])
    return np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows]), lengths


@pytest.mark.parametrize("texts", [[HELLO], [LONG], [HELLO, LONG], [""]], ids=["short", "long", "padded", "empty"])
@pytest.mark.parametrize(("dtype", "backend"), [(np.float32, "numba"), (np.float32, "numpy"), (np.float64, "numpy")])
def test_the_encoder_is_that_of_onnxruntime(paths, encoder, published, texts, dtype, backend):
    ids, lengths = batch(paths[1], *texts)
    states, mask, mean, log_deviation = published(vits.ENCODED, {"input": ids, "input_lengths": lengths})
    found = encoder(ids, lengths, dtype=dtype, backend=backend)
    assert mask.sum() == lengths.sum()
    for ours, theirs in zip(found, (states, mean, log_deviation), strict=True):
        assert ours.dtype == dtype
        assert np.abs(theirs).max() > 0.5
        np.testing.assert_allclose(ours, np.swapaxes(theirs, 1, 2), rtol=0, atol=1e-4)


def test_beyond_the_window_there_is_no_vector(paths, encoder):
    """Clipping, as in Shaw's paper, would give other numbers by far: the comparison above tells the variants apart."""
    import relpos_np as rp

    ids, lengths = batch(paths[1], LONG)
    before = encoder(ids, lengths)[1]
    kept = [layer.attention.position for layer in encoder.layers]
    try:
        for layer, scheme in zip(encoder.layers, kept, strict=True):
            layer.attention.position = rp.Shaw(scheme.key_table, scheme.value_table)
        clipped = encoder(ids, lengths)[1]
    finally:
        for layer, scheme in zip(encoder.layers, kept, strict=True):
            layer.attention.position = scheme
    assert np.abs(before - clipped).max() > 0.1


def test_it_speaks_as_the_whole_published_graph_does(paths, encoder, published, tmp_path, capsys):
    ids, lengths = batch(paths[1], HELLO)
    scales = np.array(vits_speak.SCALES, np.float32)
    (expected,) = published(["output"], {"input": ids, "input_lengths": lengths, "scales": scales})
    out = tmp_path / "hello.wav"
    assert vits_speak.main([HELLO, "--out", str(out)]) == 0
    assert "s of speech" in capsys.readouterr().err
    with wave.open(str(out)) as file:
        assert file.getframerate() == vits_speak.RATE
        heard = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
    assert 0.3 < len(heard) / vits_speak.RATE < 3
    # Samples are rounded to 16 bits.
    np.testing.assert_allclose(heard, np.clip(expected.ravel(), -1, 1), rtol=0, atol=2e-3)
    assert np.abs(heard).max() > 0.1


def test_unknown_phonemes_are_named(paths, capsys):
    assert vits_speak.main(["漢"]) == 2
    assert "the voice has no phonemes 漢" in capsys.readouterr().err
