# MARS on DiDeMo with Qwen2-VL-7B: the paper's Table 5
# paper: T2V R@1 62.1, V2T R@1 60.8 (its final-layer baseline: 57.7, 56.8). ours: not run yet
# Table 5 does not repeat the settings, so they are those of Table A2; the frame size is ours
# $ torchrun --standalone --nproc_per_node=2 train.py config/mars_qwen2vl_7b_didemo.py

out_dir = 'out/mars_qwen2vl_7b_didemo'
model = 'mars'
backbone = 'Qwen/Qwen2-VL-7B-Instruct'
# 224 x 224 = 8 x 8 tokens per pair of frames, 8 pairs: 512 tokens per video. The paper does not say
max_pixels = 224 * 224
data = 'data/didemo'
paragraph = True
num_frames = 16
sampler = 'first30'  # the captions are of the first 30 seconds; BLiM's code stops there, too

# effective batch 320 = 2 GPUs x 160 pairs, all of them in one loss; 160 / 8 = 20 chunks per GPU
batch_size = 320
chunk_size = 8
epochs = 5
warmup_epochs = 1
learning_rate = 2e-4
weight_decay = 0.05
beta1, beta2 = 0.9, 0.95

num_slots = 4  # M
lambda_div = 0.1
lambda_hn = 0.05
delta = 0.04
