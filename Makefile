# Every job by name. `make help` lists them. Options for those that train:
#   PROFILE=cpu|multi_cpu|single_gpu|multi_gpu|multi_node|mps   where to run (configs/)
#   NUM_PROCESSES=4 PRECISION=bf16                          override the profile
#   NODES=2 NODE_RANK=1 MAIN_IP=10.0.0.1 MAIN_PORT=29500    several machines: the same on each, but for its rank
#   ARGS='--seed 3 --output_dir "a b"'                      options of the script, handed on as they are
#   VENV=.venv PYTHON=python3                               the environment, and the Python that makes it

VENV ?= .venv
PYTHON ?= python3
PROFILE ?= single_gpu
export OMP_WAIT_POLICY ?= PASSIVE

VENV_PYTHON := "$(VENV)/bin/python"
# `exec`, so that a signal to make reaches the launcher and not a shell in between.
PLACE = --config_file "configs/$(PROFILE).yaml" \
	$(if $(NUM_PROCESSES),--num_processes $(NUM_PROCESSES)) $(if $(PRECISION),--mixed_precision $(PRECISION)) \
	$(if $(NODES),--num_machines $(NODES)) $(if $(NODE_RANK),--machine_rank $(NODE_RANK)) \
	$(if $(MAIN_IP),--main_process_ip $(MAIN_IP)) $(if $(MAIN_PORT),--main_process_port $(MAIN_PORT))
START = exec $(VENV_PYTHON) templates/launch.py $(PLACE)

# A demo that is done is made anew, one that was stopped goes on; a folder given in ARGS is never deleted.
ANEW = $(if $(findstring --output_dir,$(ARGS)),,$(if \
	$(shell grep -s '^ "status": "done"' outputs/$(1)/run.json),--overwrite_output_dir true))

# The methods start their own number of processes; PROFILE is not asked.
TORCHRUN = exec $(VENV_PYTHON) -m torch.distributed.run --standalone --nproc_per_node $(or $(NUM_PROCESSES),2)
METHODS := examples/parallelism

.PHONY: help
help: ## list the jobs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-24s %s\n", $$1, $$2 }' Makefile
	@echo; sed -n '1,6s/^# *//p' Makefile

.PHONY: environment
# The stamp is a copy of pyproject.toml, written last: an installation that failed, or an older one, is made again.
environment: ## make VENV and install everything that the other jobs need
	@cmp -s pyproject.toml "$(VENV)/.installed-templates" || { \
		"$(PYTHON)" -c 'import sys; sys.exit("error: Python 3.10 or newer is needed: make PYTHON=python3.12" \
			if sys.version_info < (3, 10) else 0)' \
		&& "$(PYTHON)" -m venv "$(VENV)" \
		&& $(VENV_PYTHON) -m pip install ".[demo,test,new,notebook,onnx]" \
		&& cp pyproject.toml "$(VENV)/.installed-templates"; }

.PHONY: demo
demo: environment ## train a real BERT on made sentence pairs, offline, in two minutes; then predict
	@$(VENV_PYTHON) examples/demo/pairs.py outputs/demo/data --seed 0
	@echo "What a model has to beat, on synthetic test pairs:"
	@$(VENV_PYTHON) examples/demo/baseline.py outputs/demo/data/train.jsonl outputs/demo/data/test.jsonl
	@model=$$($(VENV_PYTHON) examples/demo/model_path.py) && $(START) templates/text_classification.py \
		--config examples/demo/recipe.yaml --model_name_or_path "$$model" $(call ANEW,demo) $(ARGS)
	@echo "Three synthetic pairs that the model has not seen:"
	@$(VENV_PYTHON) examples/demo/three_pairs.py outputs/demo
	@echo "The model is in outputs/demo/best, its curve in outputs/demo/metrics.jsonl, everything else that is known of"
	@echo "the run in outputs/demo/run.json. Next: make prove; make bert-mrpc; your own data: see README.md."

.PHONY: doctor
doctor: environment ## does PROFILE fit this machine? (LAUNCH=1: start it, show who met, measure the all-reduce)
	@$(VENV_PYTHON) templates/doctor.py $(PLACE) $(if $(LAUNCH),--launch)

.PHONY: test
test: environment ## prove what is promised (TEMPLATES_DATA=FOLDER adds the tests on real data)
	$(VENV_PYTHON) -m pytest $(ARGS)

.PHONY: lint
lint: environment ## check format and style
	$(VENV_PYTHON) -m ruff format --check . && $(VENV_PYTHON) -m ruff check .

.PHONY: bert-mrpc
bert-mrpc: environment ## fine-tune BERT on GLUE MRPC
	$(START) templates/text_classification.py --config examples/bert_mrpc/recipe.yaml $(ARGS)

.PHONY: resnet50-pets
resnet50-pets: environment ## fine-tune ResNet50 on the Oxford pets
	$(START) templates/image_classification.py --config examples/resnet50_pets/recipe.yaml $(ARGS)

data-given: # before anything is installed
	@test -n "$(DATA)" || { echo "error: give DATA=FOLDER, the folder of the images" >&2; exit 2; }

.PHONY: resnet50-pets-cpu
resnet50-pets-cpu: data-given environment ## three breeds on a CPU with real weights (DATA=FOLDER of the pets)
	@$(VENV_PYTHON) examples/resnet50_pets/three_breeds.py "$(DATA)" outputs/three_breeds
	@$(VENV_PYTHON) examples/resnet50_pets/imagenet_weights.py outputs/tf_efficientnet_lite0
	$(START) templates/image_classification.py --config examples/resnet50_pets/recipe_cpu.yaml $(ARGS)

.PHONY: demo-images
demo-images: environment ## train on drawn animals, offline, in two minutes
	@$(VENV_PYTHON) examples/demo_images/make_images.py outputs/demo_images/data --seed 0
	$(START) templates/image_classification.py --config examples/demo_images/recipe.yaml \
		$(call ANEW,demo_images) $(ARGS)

.PHONY: check-data
check-data: data-given environment ## list bad, odd and doubled images (DATA=FOLDER)
	PYTHONPATH=templates $(VENV_PYTHON) examples/resnet50_pets/check_data.py --data_dir "$(DATA)" $(ARGS)

.PHONY: bench
bench: environment ## measure what the templates cost and gain: outputs/bench (TEMPLATES_DATA=FOLDER: real lengths)
	PYTHONPATH=templates $(VENV_PYTHON) examples/bench/bench.py $(ARGS)

.PHONY: bench-images
bench-images: environment ## measure the input pipeline (TEMPLATES_DATA=FOLDER: on real photos)
	PYTHONPATH=templates $(VENV_PYTHON) examples/resnet50_pets/bench_images.py --json outputs/bench_images.json $(ARGS)

.PHONY: report
report: environment ## report of a run, or several side by side (RUNS="outputs/a outputs/b")
	@test -n "$(RUNS)" || { echo "error: give RUNS, one run directory or several" >&2; exit 2; }
	@$(VENV_PYTHON) templates/report.py $(RUNS) $(ARGS)

.PHONY: predict
predict: ## predict with a finished run (RUN=outputs/a DATA=FILE_OR_FOLDER OUTPUT=new.csv)
	@test -n "$(RUN)" && test -n "$(DATA)" || { echo "error: give RUN, a run directory, and DATA, a file or folder" >&2; exit 2; }
	@$(MAKE) --no-print-directory environment
	@$(START) templates/predict.py "$(RUN)" "$(DATA)" $(if $(OUTPUT),--output "$(OUTPUT)") $(ARGS)

.PHONY: watch
watch: environment ## follow a running one: its lines, and its report renewed (RUN=outputs/a)
	@test -n "$(RUN)" || { echo "error: give RUN, a run directory" >&2; exit 2; }
	@exec $(VENV_PYTHON) templates/report.py "$(RUN)" --follow

.PHONY: sweep
# ARGS='--grid learning_rate=1e-5,3e-5 --max_train_steps 100'
sweep: environment ## train a recipe with several seeds and settings, one table (RECIPE=r.yaml SEEDS="0 1 2" TEMPLATE=image_classification)
	@test -n "$(RECIPE)" || { echo "error: give RECIPE, a recipe, and SEEDS" >&2; exit 2; }
	exec $(VENV_PYTHON) templates/sweep.py templates/$(or $(TEMPLATE),text_classification).py --config "$(RECIPE)" --seeds "$(SEEDS)" $(ARGS) -- $(PLACE)

.PHONY: export
export: environment ## write the model of a finished run as ONNX (RUN=outputs/a FORMAT=onnx)
	@test -n "$(RUN)" || { echo "error: give RUN, a run directory" >&2; exit 2; }
	@$(VENV_PYTHON) templates/export.py "$(RUN)" $(if $(FORMAT),--format "$(FORMAT)") $(ARGS)

.PHONY: push
push: environment ## upload a finished run to the hub, private (RUN=outputs/a ARGS='--hub_model_id me/model')
	@test -n "$(RUN)" || { echo "error: give RUN, a run directory" >&2; exit 2; }
	@PYTHONPATH=templates $(VENV_PYTHON) -m kit.share "$(RUN)" $(ARGS)

.PHONY: new
# From the last commit, never from what is not committed: `make update` in the project has to find it again.
new: ## start a project of your own (TEMPLATE=text_classification DEST=../mine)
	@case "$(TEMPLATE)" in blank|image_classification|text_classification) test -n "$(DEST)" ;; *) false ;; esac || { \
		echo "error: make new TEMPLATE=blank|image_classification|text_classification DEST=FOLDER" >&2; exit 2; }
	@say() { echo "error: $(DEST) $$1: give a new folder" >&2; exit 2; }; \
		if [ -f "$(DEST)" ]; then say "is a file"; fi; \
		mkdir -p "$(DEST)" 2>/dev/null && test -w "$(DEST)" || say "cannot be made"; \
		test -z "$$(ls -A "$(DEST)")" || say "is not empty"
	@$(MAKE) --no-print-directory environment
	@commit=$$(git rev-parse HEAD 2>/dev/null || true); "$(VENV)/bin/copier" copy --defaults $${commit:+--vcs-ref $$commit} \
		--data template=$(TEMPLATE) "$(CURDIR)" "$(DEST)"
	@$(VENV_PYTHON) -B "$(DEST)/tests/made_$(TEMPLATE).py" "$(DEST)/made"

.PHONY: prove
prove: environment ## train a tiny model in every way that must not matter, and print how far the runs are apart
	$(VENV_PYTHON) tests/prove.py

.PHONY: ddp-from-scratch
ddp-from-scratch: environment ## DDP by hand: broadcast, all-reduce, division
	$(TORCHRUN) $(METHODS)/ddp_from_scratch.py $(ARGS)

.PHONY: ddp
ddp: environment ## DistributedDataParallel: buckets, overlap, compression
	$(TORCHRUN) $(METHODS)/ddp.py $(ARGS)

.PHONY: ddp-accumulation
ddp-accumulation: environment ## DDP with accumulation: one exchange per step
	$(TORCHRUN) $(METHODS)/ddp_accumulation.py $(ARGS)

.PHONY: pipeline-parallel
pipeline-parallel: environment ## GPipe over processes, by hand and through torch
	$(TORCHRUN) $(METHODS)/pipeline_parallel.py $(ARGS)

.PHONY: zero
zero: environment ## optimizer, gradients, parameters sharded (ARGS='--stage 3')
	$(TORCHRUN) $(METHODS)/zero.py $(ARGS)

.PHONY: tensor-parallel
tensor-parallel: environment ## Megatron's column and row split
	$(TORCHRUN) $(METHODS)/tensor_parallel.py $(ARGS)

.PHONY: accelerate-way
accelerate-way: environment ## the same training through Accelerate
	$(TORCHRUN) $(METHODS)/accelerate_way.py $(ARGS)

.PHONY: gradient-accumulation
gradient-accumulation: environment ## micro-batches on one device
	exec $(VENV_PYTHON) $(METHODS)/gradient_accumulation.py $(ARGS)

.PHONY: data-parallel
data-parallel: environment ## DataParallel's four moves, in threads
	exec $(VENV_PYTHON) $(METHODS)/data_parallel.py $(ARGS)

.PHONY: model-parallel
model-parallel: environment ## layers on several devices
	exec $(VENV_PYTHON) $(METHODS)/model_parallel.py $(ARGS)

model-given: # before anything is installed
	@test -n "$(MODEL)" -a -n "$(GPU_MEMORY)" || { \
		echo "error: make plan MODEL=NAME_OR_FOLDER GPU_MEMORY=GB [GPUS=8 NODES=2 BANDWIDTH=GB_PER_SECOND]" >&2; exit 2; }

.PHONY: plan
plan: model-given environment ## memory, wire, micro-batch and profile of a model (MODEL=NAME GPU_MEMORY=24 GPUS=8 NODES=2)
	@exec $(VENV_PYTHON) $(METHODS)/plan.py --model "$(MODEL)" --gpu_memory "$(GPU_MEMORY)" \
		$(if $(GPUS),--gpus "$(GPUS)") $(if $(NODES),--nodes "$(NODES)") $(if $(BANDWIDTH),--bandwidth "$(BANDWIDTH)") $(ARGS)

.PHONY: compare-methods
compare-methods: environment ## measure all methods: outputs/compare_methods
	exec $(VENV_PYTHON) $(METHODS)/compare_methods.py $(ARGS)
