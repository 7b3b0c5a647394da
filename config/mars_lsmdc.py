# MARS on LSMDC with VideoChat-Flash-Qwen2-7B: the settings of the paper's Table A2
# paper: T2V R@1 51.0, V2T R@1 50.0 (Table 1, no DSL).
# ours: not run yet; fetches 16 GB from the hub, or set backbone to a folder that has them
# the paper used 2x A100 40GB:
# $ torchrun --standalone --nproc_per_node=2 train.py config/mars_lsmdc.py

out_dir = 'out/mars_lsmdc'
model = 'mars'
# Choice: the 448 px checkpoint, the only one whose cost fits the paper's Table 4
backbone = 'OpenGVLab/VideoChat-Flash-Qwen2-7B_res448'
data = 'data/lsmdc'
paragraph = False  # one caption per clip (App. A.1)
num_frames = 16

# effective batch 320 = 2 GPUs x 160 pairs, all of them in one loss; 160 / 8 = 20 chunks per GPU
batch_size = 320
chunk_size = 8
epochs = 3
warmup_epochs = 1
learning_rate = 2e-4
weight_decay = 0.05
beta1, beta2 = 0.9, 0.95

num_slots = 4  # M
lambda_div = 0.1
lambda_hn = 0.05
delta = 0.04
