"""Serve the web page, the state of the server, and its metrics."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, JSONResponse, Response

from strop.serve.asking import GivenService
from strop.serve.metrics import CONTENT_TYPE

PAGE = Path(__file__).parent / "page"
router = APIRouter(tags=["server"])


@router.get("/", response_class=FileResponse)
async def page() -> FileResponse:
    """Return the web page."""
    return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})


@router.get("/healthz")
async def health(service: GivenService) -> JSONResponse:
    """Tell whether the server takes orders: status 200, or 503 while it is stopping."""
    state = "stopping" if service.is_draining else "ready"
    content = {"state": state, "model": service.painter.card.name}
    return JSONResponse(content, 503 if service.is_draining else 200)


@router.get("/metrics", response_class=Response)
async def metrics(service: GivenService) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)
