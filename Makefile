# Every target calls a script or a command; nothing is decided here.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo lint format test docs generate parity bench-smoke

setup:        ## create .venv and install everything (quick when nothing changed)
	@$(PYTHON) scripts/setup_env.py

demo: setup   ## a real model answers from a long text, dense and sparse
	@$(BIN)/sparseengine demo

test: setup   ## the whole suite, the README's and the docs' code blocks included
	@$(BIN)/python scripts/test.py

lint: setup   ## ruff, mypy --strict, import layers, house rules, generated pages
	@$(BIN)/python scripts/lint.py

format: setup ## rewrite the code in the house format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

docs: setup   ## run the code blocks of README.md and docs/
	@$(BIN)/python -m pytest tests/docs

generate: setup ## write docs/reference/ from the code
	@$(BIN)/python scripts/generate.py

parity: setup ## compare with kvpress in an environment of its own (docs/results/parity-kvpress.md)
	@$(BIN)/python scripts/parity.py

bench-smoke: setup ## the benchmark on a tiny random model, in seconds
	@$(BIN)/sparseengine bench throughput --load-format dummy --hf-config smollm2-135m --hf-overrides '{"num_hidden_layers": 2}' --input-len 64 --output-len 8 --batch-size 2 --sparse-method snapkv --kv-budget 32
