# PHA-Net on Charades with CLIP ViT-B/32: the settings of Sec. 4.1
# paper: T2V R@1 13.6, V2T R@1 13.6 (Table 2).
# ours: not run
# the paper used 4x RTX 3090 24GB:
# $ torchrun --standalone --nproc_per_node=4 train.py config/pha_charades.py
# $ python eval.py --ckpt out/pha_charades  # one caption per video, so --v2t changes nothing

out_dir = 'out/pha_charades'
model = 'pha'
backbone = 'openai/clip-vit-base-patch32'
data = 'data/charades'
paragraph = False  # "typically" one caption per video (Sec. 4.1)
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
