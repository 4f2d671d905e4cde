import numpy as np
import pytest

from flashpoint.errors import ProtocolError
from flashpoint.replication import sealing
from flashpoint.replication.sealing import TAG_BYTES, Opener, Sealer

KEY = bytes(range(32))


def test_what_is_sealed_opens_into_its_place():
    payload = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    payload.flags.writeable = False
    nonce, sealed = Sealer(KEY).seal(b"header", payload.data)
    assert len(sealed) == len(payload) + TAG_BYTES
    target = np.zeros(len(payload) + 20, dtype=np.uint8)
    Opener(KEY).open_into(nonce, b"header", sealed, target[10:-10])
    assert (target[10:-10] == payload).all()
    assert not target[:10].any() and not target[-10:].any()
    assert Opener(KEY).open(nonce, b"header", sealed) == payload.tobytes()


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_small_payloads(payload):
    nonce, sealed = Sealer(KEY).seal(b"h", payload)
    target = bytearray(len(payload))
    Opener(KEY).open_into(nonce, b"h", sealed, memoryview(target))
    assert target == payload


def test_no_nonce_comes_twice_and_a_used_up_key_seals_no_more(monkeypatch):
    monkeypatch.setattr(sealing, "MESSAGES_MAX", 1000)
    sealer = Sealer(KEY)
    nonces = [sealer.seal(b"", b"same")[0] for _ in range(1000)]
    assert len(set(nonces)) == 1000
    for _ in range(2):
        with pytest.raises(ProtocolError, match="no-session"):
            sealer.seal(b"", b"same")


def test_a_seal_that_failed_uses_its_nonce_up():
    sealer = Sealer(KEY)
    with pytest.raises(TypeError):
        sealer.seal("no bytes", b"one")
    assert sealer.seal(b"", b"two")[0] == (1).to_bytes(12, "big")


def test_any_change_is_found():
    nonce, sealed = Sealer(KEY).seal(b"header", b"payload")
    sealed = bytes(sealed)
    target = np.zeros(7, dtype=np.uint8)
    for place in range(len(sealed)):
        changed = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with pytest.raises(ProtocolError, match="corrupt"):
            Opener(KEY).open_into(nonce, b"header", changed, target)
    for wrong_nonce, header, key in (
        (bytes(11) + b"\1", b"header", KEY),
        (nonce, b"Header", KEY),
        (nonce, b"header", bytes(32)),
        (b"", b"header", KEY),
    ):
        with pytest.raises(ProtocolError, match="corrupt"):
            Opener(key).open_into(wrong_nonce, header, sealed, target)
        with pytest.raises(ProtocolError, match="corrupt"):
            Opener(key).open(wrong_nonce, header, sealed)


@pytest.mark.parametrize("nbytes", [0, 6, 8, 100])
def test_a_target_of_another_size_is_refused(nbytes):
    nonce, sealed = Sealer(KEY).seal(b"", b"payload")
    with pytest.raises(ProtocolError, match="malformed"):
        Opener(KEY).open_into(nonce, b"", sealed, np.zeros(nbytes, dtype=np.uint8))


@pytest.mark.parametrize("nbytes", range(16))
def test_less_than_a_tag_is_refused(nbytes):
    with pytest.raises(ProtocolError):
        Opener(KEY).open(bytes(12), b"", bytes(nbytes))
    with pytest.raises(ProtocolError):
        Opener(KEY).open_into(bytes(12), b"", bytes(nbytes), np.zeros(0, dtype=np.uint8))
