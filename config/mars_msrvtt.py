# MARS on MSR-VTT 1k-A with VideoChat-Flash-Qwen2-7B: the settings of the paper's Table A2
# paper: T2V R@1 61.6, V2T R@1 59.0 (Table 1, no DSL).
# ours: not run yet; fetches 16 GB from the hub, or set backbone to a folder that has them
# the paper used 2x A100 40GB:
# $ torchrun --standalone --nproc_per_node=2 train.py config/mars_msrvtt.py

out_dir = 'out/mars_msrvtt'
model = 'mars'
# Choice: the 448 px checkpoint, the only one whose cost fits the paper's Table 4
backbone = 'OpenGVLab/VideoChat-Flash-Qwen2-7B_res448'
data = 'data/msrvtt'
paragraph = False  # 20 captions per video, each one a pair of its own (App. A.1)
num_frames = 16

# effective batch 512 = 2 GPUs x 256 pairs, all of them in one loss; 256 / 8 = 32 chunks per GPU
batch_size = 512
chunk_size = 8
epochs = 3
warmup_epochs = 1
learning_rate = 1e-4
weight_decay = 0.05
beta1, beta2 = 0.9, 0.95

num_slots = 3  # M
lambda_div = 0.1
lambda_hn = 0.05
delta = 0.04
