"""Put the parts of a server together as one ASGI app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles

import strop
from strop.serve import native_api, openai_api, pages, sdapi, sdapi_controls, sdapi_state
from strop.serve.guard import App, GuardRules, HttpGuard
from strop.serve.refused import Refused
from strop.serve.service import Service
from strop.serve.wrong_fields import refused_for

_ADVICE = {
    404: "this server has nothing under that path; /openapi.json lists what it has",
    405: "this path is not asked by that method; /openapi.json says by which one",
}


def build_app(service: Service, rules: GuardRules | None = None) -> App:
    """Return the app: the interfaces behind the guard. The service starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    inner = FastAPI(
        title="Strop",
        version=strop.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    inner.state.service = service
    for part in (openai_api, sdapi, sdapi_state, sdapi_controls, native_api, pages):
        inner.include_router(part.router)
    inner.mount("/page", StaticFiles(directory=pages.PAGE), name="page")
    inner.add_exception_handler(Refused, _refused)
    inner.add_exception_handler(RequestValidationError, _invalid)
    inner.add_exception_handler(HTTPException, _other)
    return HttpGuard(inner, rules or GuardRules(), service.limits, service.metrics)


def _shown(refused: Refused) -> JSONResponse:
    return JSONResponse(refused.body, refused.status, refused.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _shown(error)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _shown(refused_for(error.errors()))


async def _other(_: Request, error: Exception) -> Response:
    """Answer what the router itself refuses: unknown routes, methods, and bodies that break its
    reader."""
    assert isinstance(error, HTTPException)
    text = _ADVICE.get(error.status_code, str(error.detail))
    answer = _shown(Refused(error.status_code, "refused", text))
    answer.headers.update(error.headers or {})
    return answer
