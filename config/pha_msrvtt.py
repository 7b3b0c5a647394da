# PHA-Net on MSR-VTT 1k-A (9k training videos) with CLIP ViT-B/32: the settings of Sec. 4.1
# paper: T2V R@1 48.1, V2T R@1 46.5 (Table 1, no DSL; with DSL 49.8, 51.0).
# ours: not run
# the paper used 4x RTX 3090 24GB:
# $ torchrun --standalone --nproc_per_node=4 train.py config/pha_msrvtt.py
# $ python eval.py --ckpt out/pha_msrvtt  # one caption per test video, so --v2t changes nothing

out_dir = 'out/pha_msrvtt'
model = 'pha'
backbone = 'openai/clip-vit-base-patch32'
data = 'data/msrvtt'
paragraph = False  # 20 captions per video, each one a pair of its own: 180,000 pairs (HBI)
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
