"""A resources server of NeMo Gym 0.7 whose `verify` is a composite reward.

Its config, beside `entrypoint` and `domain`:

    reward: {definition: reward.yaml, src_key: src}

`reward` has the settings of RewardSettings. NeMo Gym starts the server itself: requests of web
pages of other sites and of foreign hosts are refused, but the size of bodies and the number of
connections are NeMo Gym's. This module imports NeMo Gym: import it only where that is installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from fastapi import FastAPI
from nemo_gym.base_resources_server import (
    BaseMultiRewardVerifyResponse,
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    SimpleResourcesServer,
)
from pydantic import ConfigDict, PrivateAttr

from scorekit.adapters.nemo_gym.reward import Verifier, refuse_foreign_requests
from scorekit.adapters.shared import reward_settings


class RewardServerConfig(BaseResourcesServerConfig):  # type: ignore[misc]
    """The config of the server.

    reward: settings of RewardSettings.
    wait_s: seconds to wait for the services at first.
    allow_host: further names under which others call the server, separated by commas."""

    reward: dict[str, Any]
    wait_s: float = 600.0
    allow_host: str = ""


class RowRequest(BaseVerifyRequest):  # type: ignore[misc]
    """A request with all fields of the dataset's row. NeMo Gym keeps only those it knows."""

    model_config = ConfigDict(extra="allow")


class RowResponse(BaseMultiRewardVerifyResponse):  # type: ignore[misc]
    """The answer: the request, the reward, its components, and numbers for the metrics."""

    model_config = ConfigDict(extra="allow")


class CompositeRewardServer(SimpleResourcesServer):  # type: ignore[misc]
    """Verifies a response by a reward definition.

    A response without a reward raises, which is status 500: NeMo Gym's own failure of a judge is an
    answer with reward 0. Raises UserError if the config is wrong.
    """

    ray_enabled: ClassVar[bool | None] = False
    config: RewardServerConfig
    _verifier: Verifier = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Load the definition; nothing is requested yet."""
        super().model_post_init(context)
        self._verifier = Verifier(reward_settings(**self.config.reward))

    def setup_webserver(self) -> FastAPI:
        """Return NeMo Gym's application. It starts once all services are ready and fit."""
        app = super().setup_webserver()
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            try:
                await self._verifier.check(self.config.wait_s)
                async with inner(app) as state:
                    yield state
            finally:
                await self._verifier.close()

        app.router.lifespan_context = lifespan
        refuse_foreign_requests(app, self.config.host, self.config.allow_host)
        return app

    async def verify(self, body: RowRequest) -> RowResponse:
        """Return the reward of a response. Raises the errors of `Verifier.verify`."""
        request = body.model_dump(mode="json")
        answer = await self._verifier.verify(request)
        return RowResponse.model_validate({**request, **answer})
