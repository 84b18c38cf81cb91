"""Any reward model: a sequence classifier of transformers behind `POST /v1/score`."""
