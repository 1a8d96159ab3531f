"""The OpenAPI 3.1 document of the retriever, generated from the request models. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from protocol.runtime.http import openapi as made
from protocol.runtime.http.openapi import ARRAY, OBJECT, REF, STRING, Object, array, record, response
from protocol.search import Passage, SearchRequest
from retriever.api.flashrag import ManyQueries, OneQuery
from retriever.api.openai import EmbeddingRequest

DOCUMENT: Object = {"$ref": REF.format(model="Passage")}
SCORED = record(document=DOCUMENT, score={"type": "number"})
RESULT = record(
    result=array(array({"anyOf": [SCORED, DOCUMENT]})), optional={"errors": array({"type": ["string", "null"]})}
)
ERROR = record(error={"type": ["string", "object"]})
EMBEDDINGS = record(
    object={"const": "list"}, data=array(record("object", "index", "embedding")), model=STRING, usage=OBJECT
)
MODELS = record("object", "data")


class _Dialect(NamedTuple):
    body: type[BaseModel]
    answer: Object
    summary: str


DIALECTS = {
    "/retrieve": _Dialect(SearchRequest, RESULT, "Search-R1's dialect: passages for queries."),
    "/search": _Dialect(OneQuery, ARRAY, "FlashRAG's dialect: documents for one query."),
    "/batch_search": _Dialect(ManyQueries, ARRAY, "FlashRAG's dialect: documents for queries."),
    "/v1/embeddings": _Dialect(
        EmbeddingRequest, EMBEDDINGS, "OpenAI's dialect: vectors of texts, by the index's encoder."
    ),
}
FAILURES = {
    **made.REFUSALS,
    "400": "the error in the request",
    "404": "not found",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "429": "overloaded; see Retry-After",
    "500": "the index failed",
    "502": "a provider failed",
    "503": "not open, or stopping",
}


def describe() -> Object:
    """Return the OpenAPI document."""
    models = [(model, "validation") for model in (*(dialect.body for dialect in DIALECTS.values()), Passage)]
    _, definitions = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    failed, name = made.failures(FAILURES, ERROR), {**STRING, "minLength": 1}

    def get(summary: str, answer: Object, *parameters: Object) -> Object:
        return {"get": made.operation({"200": answer} | failed, summary=summary, parameters=parameters)}

    document_of = response("the document", DOCUMENT)
    ready = {"200": response("ready", OBJECT), "503": response("not open", ERROR)}
    paths: Object = {
        path: {
            "post": made.operation(
                {"200": response("found", answer)} | failed,
                summary=summary,
                body={"$ref": REF.format(model=body.__name__)},
            )
        }
        for path, (body, answer, summary) in DIALECTS.items()
    }
    paths |= {
        "/v1/models": get("The encoder's name, in OpenAI's form.", response("one model", MODELS)),
        "/passages": get("A document by `?id=`.", document_of, made.parameter("id", "query", name)),
        "/passages/{id}": get("A document by its id.", document_of, made.parameter("id", "path", name)),
        "/info": get("What is served, and its limits.", response("state", OBJECT)),
        "/health": made.open_get("The process is alive.", {"200": response("healthy", OBJECT)}),
        "/ready": made.open_get("Searches are answered.", ready),
        "/metrics": get("Prometheus.", response("metrics", STRING, made.TEXT)),
        "/openapi.json": get("This document.", response("OpenAPI", OBJECT)),
    }
    return made.document("Foray retriever", paths, schemas=definitions["$defs"])


openapi = made.serve_document(describe)
