# make demo    render clips, train the methods and their baselines on them, print one table
# make test    the unit tests
# make bench   time and memory, measured side by side
# make ablate_pha   PHA-Net's Tables 3, 5, 7, 9 in small, on the demo; goes on where it was stopped
# make ablate_slq   SLQ's Table 5, Fig. 7 and Fig. 2 in the same way
# Each first creates .venv from requirements.txt when that is missing or older.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PY = .venv/bin/python
DEMO = untrained baseline mars slq clip_zeroshot clip pha

.PHONY: demo test bench ablate_pha ablate_slq

demo: .venv/installed
	$(PY) data/demo/prepare.py
	$(PY) train.py config/demo_baseline.py --resume --out_dir=out/demo_untrained --epochs=0
	$(PY) train.py config/demo_baseline.py --resume
	$(PY) train.py config/demo_mars.py --resume
	$(PY) train.py config/demo_slq.py --resume
	$(PY) train.py config/demo_clip.py --resume --out_dir=out/demo_clip_zeroshot --epochs=0
	$(PY) train.py config/demo_clip.py --resume
	$(PY) train.py config/demo_pha.py --resume
	$(PY) eval.py --ckpt $$(echo $(addprefix out/demo_,$(DEMO)) | tr ' ' ,)

test: .venv/installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile tests

bench: .venv/installed
	$(PY) bench.py

ablate_pha: .venv/installed
	$(PY) data/demo/prepare.py
	$(PY) ablate.py --tables=pha

ablate_slq: .venv/installed
	$(PY) data/demo/prepare.py
	$(PY) ablate.py --tables=slq --seeds=1

.venv/installed: requirements.txt
	@test -n "$(PYTHON)" || { echo "nanoTVR needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	@echo 'making .venv: some GB of packages, a few minutes the first time'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@
