# MARS on DiDeMo with VideoLLaMA3-7B: the paper's Table 5
# paper: T2V R@1 63.8, V2T R@1 61.1 (its final-layer baseline: 61.0, 56.8). ours: not run yet
# Table 5 does not repeat the settings, so they are those of Table A2; the frame size is ours
# $ torchrun --standalone --nproc_per_node=2 train.py config/mars_videollama3_7b_didemo.py

out_dir = 'out/mars_videollama3_7b_didemo'
model = 'mars'
# the makers' files; their code is not run, the modules are transformers' own
backbone = 'DAMO-NLP-SG/VideoLLaMA3-7B'
# 224 x 224 = 8 x 8 tokens per frame, 16 frames: at most 1024 tokens per video and a few words of
# time at each frame. Tokens that do not change from frame to frame are dropped
max_pixels = 224 * 224
data = 'data/didemo'
paragraph = True
num_frames = 16

# effective batch 320 = 2 GPUs x 160 pairs, all of them in one loss; 160 / 4 = 40 chunks per GPU
batch_size = 320
chunk_size = 4
eval_batch_size = 32  # 64 would not fit 40 GB, by --plan
epochs = 5
warmup_epochs = 1
learning_rate = 2e-4
weight_decay = 0.05
beta1, beta2 = 0.9, 0.95

num_slots = 4  # M
lambda_div = 0.1
lambda_hn = 0.05
delta = 0.04
