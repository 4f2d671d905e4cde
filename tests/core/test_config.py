import dataclasses
import math

import msgspec
import pytest

from flashpoint.config import COPIES_MAX, FlashpointConfig, parse_bytes
from flashpoint.errors import ConfigError
from flashpoint.replication.membership import Member, Membership


def test_defaults_hold_where_nothing_is_given():
    assert FlashpointConfig.from_env({}) == FlashpointConfig()


def test_an_argument_wins_over_the_environment_and_the_environment_over_the_default():
    environ = {"FLASHPOINT_KEEP": "3", "FLASHPOINT_STRICT": "yes"}
    config = FlashpointConfig.from_env(environ, keep=5, strict=None)
    assert (config.keep, config.strict, config.verify) == (5, True, True)


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("FLASHPOINT_MEMORY_LIMIT_BYTES", "12GiB")
    assert FlashpointConfig.from_env().memory_limit_bytes == 12 << 30


@pytest.mark.parametrize("field", dataclasses.fields(FlashpointConfig), ids=lambda field: field.name)
def test_every_setting_can_come_from_the_environment_with_its_type(field):
    text, value = {bool: ("on", True), int: ("8192", 8192), float: ("2.5", 2.5), str: (" rack-7 ", "rack-7")}[
        type(field.default)
    ]
    text, value = {
        "copies": ("64", 64),
        "agent": ("embedded", "embedded"),
        "storage": (" s3://bucket/a ", "s3://bucket/a"),
    }.get(field.name, (text, value))
    config = FlashpointConfig.from_env({f"FLASHPOINT_{field.name.upper()}": text})
    assert getattr(config, field.name) == value
    assert type(getattr(config, field.name)) is type(field.default)


def test_settings_as_an_environment_give_the_settings_back():
    config = FlashpointConfig(
        keep=3,
        strict=True,
        verify=False,
        memory_limit_bytes=12 << 30,
        recycle_grace_s=0.1,
        agent="embedded",
        failure_domain="räck 7",
        agent_idle_s=math.inf,
    )
    assert FlashpointConfig.from_env(config.to_env()) == config
    assert FlashpointConfig.from_env(FlashpointConfig().to_env()) == FlashpointConfig()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        (" 12GiB ", 12 << 30),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_carry_binary_units(text, nbytes):
    assert parse_bytes(text) == nbytes
    assert FlashpointConfig.from_env({}, memory_limit_bytes=text).memory_limit_bytes == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "12GB", "12G", "-1", "+1", "1e9", "1,5GiB", "0x10", "١٢", "1 2", "12GiBs", "nan", "1_000"],
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", "two"), ("keep", ""), ("keep", "1.5"), ("keep", "-1"), ("keep", "1KiB"),
        ("strict", "maybe"), ("strict", ""), ("strict", "2"),
        ("memory_limit_bytes", "12GB"), ("memory_limit_bytes", "-5"),
        ("memory_limit_bytes", "9" * 400 + ".5GiB"),
        ("chunk_bytes", "4095"), ("chunk_bytes", "5000"), ("chunk_bytes", "0"),
        ("seal_threads", "0"), ("load_threads", "-1"),
        ("commit_timeout_s", "0"), ("commit_timeout_s", "-1"), ("commit_timeout_s", "inf"),
        ("commit_timeout_s", "nan"), ("commit_timeout_s", "soon"), ("recovery_timeout_s", "inf"),
        ("recycle_grace_s", "-0.1"), ("recycle_grace_s", "nan"), ("overlap_wait_s", "-1"),
        ("copies", "-1"), ("copies", "65"), ("agent", "thread"), ("agent", ""), ("failure_domain", "r" * 129),
        ("failure_domain", "a\nb"), ("agent_host", "h" * 254), ("agent_host", "a b"), ("agent_host", "a\0"),
        ("agent_port", "65536"), ("agent_port", "-1"), ("agent_bulk_port", "http"), ("agent_idle_s", "-1"),
        ("agent_idle_s", "nan"), ("encrypt", "perhaps"), ("peer_timeout_s", "0"), ("peer_timeout_s", "inf"),
    ],
)  # fmt: skip
def test_a_bad_value_names_where_it_came_from(name, value):
    variable = f"FLASHPOINT_{name.upper()}"
    with pytest.raises(ConfigError, match=variable):
        FlashpointConfig.from_env({variable: value})
    with pytest.raises(ConfigError, match=f"^{name}"):
        FlashpointConfig.from_env({variable: value}, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", 1.5), ("keep", True), ("keep", math.inf), ("keep", math.nan), ("keep", [1]), ("keep", -1),
        ("strict", 2), ("strict", []), ("commit_timeout_s", True), ("commit_timeout_s", None.__class__),
        ("recycle_grace_s", "x"), ("chunk_bytes", 4096.5), ("agent", 1), ("agent_host", b"localhost"),
        ("failure_domain", ["rack"]), ("copies", True), ("agent_port", 1.5),
    ],
)  # fmt: skip
def test_an_argument_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}"):
        FlashpointConfig.from_env({}, **{name: value})


def test_whole_numbers_may_be_floats_and_seconds_may_be_ints():
    config = FlashpointConfig.from_env({}, keep=2.0, commit_timeout_s=5)
    assert (config.keep, type(config.keep)) == (2, int)
    assert (config.commit_timeout_s, type(config.commit_timeout_s)) == (5.0, float)


def test_an_unknown_setting_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ConfigError, match=r"'kepp' is not a setting.*keep"):
        FlashpointConfig.from_env({}, kepp=3)
    with pytest.raises(ConfigError, match="kepp"):
        FlashpointConfig.from_env({}, kepp=None)


def test_what_a_config_lets_pass_a_membership_takes():
    members = (Member(index=0, node="n", ranks=(0,)),)
    membership = Membership(job="0" * 32, epoch=1, copies=COPIES_MAX, members=members)
    fields = msgspec.to_builtins(membership)
    assert msgspec.convert(fields, Membership) == membership
    with pytest.raises(msgspec.ValidationError, match="copies"):
        msgspec.convert(fields | {"copies": COPIES_MAX + 1}, Membership)


def test_variables_of_others_are_none_of_our_business():
    assert FlashpointConfig.from_env({"KEEP": "7", "FLASHPOINT_HOME": "/x"}) == FlashpointConfig()


def test_settings_do_not_change_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlashpointConfig().keep = 3


@pytest.mark.parametrize(
    "url", ["file:///mnt/checkpoints/job 1", "s3://bucket", "s3://bucket/a/b", "gs://bucket/a", ""]
)
def test_storage_is_a_url(url):
    config = FlashpointConfig.from_env({}, storage=url)
    assert config.storage == url
    assert config.has_agent == bool(url)


@pytest.mark.parametrize(
    "url",
    ["/mnt/checkpoints", "file://mnt", "file:///", "file:///a/../b", "s3://", "s3:///a", "s3:/bucket", "ftp://host/a",
     "S3://bucket", "s3://bucket/\n", "hdfs"],
)  # fmt: skip
def test_what_is_no_storage_is_refused_with_an_example(url):
    with pytest.raises(ConfigError, match="storage must"):
        FlashpointConfig(storage=url)


def test_a_bandwidth_may_carry_a_unit():
    assert FlashpointConfig.from_env({}, storage_bytes_per_s="10MiB").storage_bytes_per_s == 10 << 20
