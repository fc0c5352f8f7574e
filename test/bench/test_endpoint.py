"""`bench tools`' client."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from server import Handler

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.tools import Endpoint

Serve = Callable[[Handler], str]


def test_no_openai_server(serve: Serve) -> None:
    for url in (serve(lambda *_: (200, "<html>")), "http://127.0.0.1:9"):
        with pytest.raises(SweepError, match="expected OpenAI's list of models"):
            Endpoint(url).model()


def test_the_url_and_the_key(serve: Serve) -> None:
    url = serve(lambda path, key, fields: (200, json.dumps({"data": [{"id": f"{path} {key}"}]})))
    for form in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
        assert Endpoint(form).model() == "/v1/models None"
    assert Endpoint(url, "key").model() == "/v1/models Bearer key"
