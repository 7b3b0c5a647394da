# PHA-Net on ActivityNet Captions (val_1) with CLIP ViT-B/32: the settings of Sec. 4.1
# paper: T2V R@1 46.2, V2T R@1 45.1 (Table 2).
# ours: not run
# the paper used 4x RTX 3090 24GB:
# $ torchrun --standalone --nproc_per_node=4 train.py config/pha_activitynet.py
# $ python eval.py --ckpt out/pha_activitynet  # one paragraph per video, so --v2t changes nothing

out_dir = 'out/pha_activitynet'
model = 'pha'
backbone = 'openai/clip-vit-base-patch32'
data = 'data/activitynet'
paragraph = True  # a video's captions joined by blanks: video-paragraph retrieval
num_frames = 64  # N_f
sampler = 'fps3'  # "frame rate 3", then uniform down to num_frames
frame_size = 224  # "resized into 224 width or 224 height"
max_words = 64  # N_w: what is longer is cut, eval.py says how many

# 64 pairs = 4 GPUs x 16, all of them in one loss. A GPU has 1,024 frames per step: in chunks of 4
# pairs, with the gradient of all 64; memory was not measured, 0 (no chunks) saves a forward
batch_size = 64
chunk_size = 4
eval_batch_size = 16
epochs = 20
# Choice: only "a cosine schedule" is stated. As HBI, its baseline: a tenth of the steps of linear
# warmup, weight decay and Adam's constants
warmup_epochs = 2
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
