"""Which names are secrets, and how values are hidden."""

import copy
import json
import pickle

import pytest

from drivetrain.core.secret import MASK, Secret, hide, is_masked, looks_secret, mask_command, masked, texts_of

SECRETS = """key token password passwd secret credential credentials api_key openai_key hf_token wandb_api_key client_secret db_password
apiKey hfToken APIKEY access_token api_keys github_token aws_secret_access_key authToken opt.api_key service_account_key passphrase
user_password bearer_token ssh_key""".split()
OTHERS = """num_tokens max_tokens tokenizer tokenizer_name key_dim n_keys keys tokens pad_token eos_token bos_token mask_token cls_token
unk_token special_tokens stop_tokens sort_key target_key image_key label_key num_key_value_heads keypoint token_type monkey
tokens_per_batch secretary password_length d_key n_token keyword key_padding secret_dim lr epochs keys_per_head image_token""".split()


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets_are_known(name):
    assert looks_secret(name)


@pytest.mark.parametrize("name", OTHERS)
def test_words_of_the_field_are_not_secrets(name):
    assert not looks_secret(name)


def test_a_secret_shows_itself_only_when_asked():
    secret = Secret("hunter22")
    shown = [
        str(secret),
        repr(secret),
        f"{secret}",
        f"{secret!r:>30}",
        str([secret]),
        str({"a": secret}),
    ]
    assert all("hunter22" not in text and MASK in text for text in shown)
    assert secret.reveal() == secret.get_secret_value() == "hunter22"
    assert not hasattr(secret, "__dict__")
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert secret == Secret("hunter22") != Secret("other") and len({secret, Secret("hunter22")}) == 1
    assert pickle.loads(pickle.dumps(secret)) == copy.deepcopy(secret) == secret  # between our own processes


def test_masked_hides_secrets_at_any_depth_and_nothing_else():
    values = {
        "lr": 0.1,
        "api_key": "abcd",
        "token": 5,
        "password": None,
        "inner": [{"secret": "x", "max_tokens": 3}],
        "typed": Secret("y"),
        "api_keys": ["a", "b"],
    }
    assert masked(values) == {
        "lr": 0.1,
        "api_key": MASK,
        "token": 5,
        "password": None,
        "inner": [{"secret": MASK, "max_tokens": 3}],
        "typed": MASK,
        "api_keys": [MASK, MASK],
    }
    assert texts_of(values) == {"abcd", "x", "y", "a", "b"}
    assert is_masked(masked(values)) and not is_masked(values)


def test_pydantic_secrets_are_masked_the_same_way():
    pydantic = pytest.importorskip("pydantic")
    assert masked(pydantic.SecretStr("abcd")) == MASK == str(pydantic.SecretStr("abcd"))
    assert texts_of(pydantic.SecretStr("abcd")) == {"abcd"}


def test_hide_replaces_whole_secrets_first_and_leaves_words_alone():
    assert hide("key=abcdef abcd", ["abcd", "abcdef"]) == f"key={MASK} {MASK}"
    assert hide("a bad idea", ["a", "ad", ""]) == "a bad idea"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--api-key", "abc", "--lr", "1"], ["--api-key", MASK, "--lr", "1"]),
        (["--api_key=abc", "x"], [f"--api_key={MASK}", "x"]),
        (["--set", "api_key=abc"], ["--set", f"api_key={MASK}"]),
        (["--opt.password", "-x"], ["--opt.password", "-x"]),
        (["--hosts", "http://u:abcd@h"], ["--hosts", f"http://u:{MASK}@h"]),
        (["--names", "a", "b", "--own", "c"], ["--names", "a", "b", "--own", MASK]),
        (["--max-tokens", "5", "--pad-token", "<p>"], ["--max-tokens", "5", "--pad-token", "<p>"]),
    ],
)
def test_commands_are_written_without_secrets(words, expected):
    assert mask_command(words, {"api_key", "own"}, {"abcd"}) == expected
