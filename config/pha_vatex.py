# PHA-Net on VATEX (HGR's split: 25,991 / 1,500 / 1,500 videos) with CLIP ViT-B/32: Sec. 4.1
# paper: T2V R@1 60.7, V2T R@1 75.9 (Table 2).
# ours: not run
# the paper used 4x RTX 3090 24GB:
# $ torchrun --standalone --nproc_per_node=4 train.py config/pha_vatex.py
# $ python eval.py --ckpt out/pha_vatex --v2t=group
# Choice: the paper names no V2T convention; in the CLIP4Clip line, which its table compares with, a
# video's best caption stands for all of them (group)

out_dir = 'out/pha_vatex'
model = 'pha'
backbone = 'openai/clip-vit-base-patch32'
data = 'data/vatex'
paragraph = False  # 10 English captions per video, each one a pair of its own
num_frames = 12  # N_f
sampler = 'fps3'  # "frame rate 3", then uniform down to num_frames
frame_size = 224  # "resized into 224 width or 224 height"
max_words = 32  # N_w

# 128 pairs = 4 GPUs x 32, all of them in one loss
batch_size = 128
epochs = 5
# Choice: only "a cosine schedule" is stated. As HBI, its baseline: a tenth of the steps of linear
# warmup, weight decay and Adam's constants
warmup_epochs = 0.5
learning_rate = 1e-4
clip_lr_scale = 1e-3  # CLIP at 1e-7
weight_decay = 0.2
beta1, beta2 = 0.9, 0.98
adam_eps = 1e-6

alpha = 0.5
beta = 0.1
lambda_dl = 0.2
mu_pcl = 0.2
sigma = 0.01
