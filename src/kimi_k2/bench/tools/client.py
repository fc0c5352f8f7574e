"""Chat requests to an OpenAI server."""

from __future__ import annotations

from typing import Any
from urllib.request import getproxies

import aiohttp

from kimi_k2.bench.errors import SweepError

FAILED = (aiohttp.ClientError, OSError)  # no answer, or one that breaks off


class Endpoint:
    """A server under `url`, which ends in /v1 (it is added if missing).

    Args:
        api_key: sent as a bearer token; None for none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        root = url.rstrip("/")
        self.url = root if root.endswith("/v1") else f"{root}/v1"
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections; made in the event loop that first asks for them."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=bool(getproxies()),  # else each request would look for proxies
            )
        return self._session

    async def model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
            SweepError: it does not answer as OpenAI's API does.
        """
        try:
            limit = aiohttp.ClientTimeout(total=30)
            async with self.session.get(f"{self.url}/models", timeout=limit) as answer:
                answer.raise_for_status()
                name = (await answer.json())["data"][0]["id"]
        except (*FAILED, ValueError, LookupError, TypeError) as error:
            raise SweepError(f"{self.url}/models: expected OpenAI's list of models: {error!r}") from None
        return str(name)

    async def chat(self, fields: dict[str, Any]) -> tuple[int, str]:
        """Status and text of the answer to a chat request that is not streamed.

        Raises:
            aiohttp.ClientError, OSError: there is none.
        """
        async with self.session.post(f"{self.url}/chat/completions", json=fields) as response:
            return response.status, await response.text(errors="replace")

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
