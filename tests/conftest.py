"""
What several test files need: the repo's root on the path, tiny random checkpoints of the real
classes, a data folder of tiny clips.
"""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHARED = ROOT.parent / 'shared'  # not part of the repo; tests that read it skip without it

WORDS = ('a red blue green circle square triangle moves left right up down then grows shrinks the '
         'Summarize above video sentence in one word: You are helpful assistant. system user, .')
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>',
           '<|video_pad|>', '<|image_pad|>']


def make_tokenizer(folder, special=SPECIAL):
    """A byte-level BPE tokenizer with Qwen2's special tokens, learned on a handful of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator([WORDS] * 10, trainer)
    tok.add_special_tokens(special)
    from transformers import PreTrainedTokenizerFast
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token='<|im_end|>',
                                   pad_token='<|endoftext|>', additional_special_tokens=special)
    fast.save_pretrained(folder)
    return fast


def make_qwen2vl(folder, layers=3, hidden=32, seed=0, **text):
    """A random Qwen2-VL of the native class, saved: frames of 16x16, patch 4, merge 2."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    tok = make_tokenizer(folder)
    ids = {name: tok.convert_tokens_to_ids(f'<|{name}|>') for name in
           ('vision_start', 'vision_end', 'video_pad', 'image_pad', 'endoftext', 'im_end')}
    section = [hidden // 8 - 2 * (hidden // 24), hidden // 24, hidden // 24]  # sums to head_dim / 2
    config = Qwen2VLConfig(
        text_config=dict(vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden,
                         num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                         tie_word_embeddings=True, bos_token_id=None, eos_token_id=ids['im_end'],
                         pad_token_id=ids['endoftext'],
                         rope_parameters=dict(rope_type='default', rope_theta=1e6,
                                              mrope_section=section), **text),
        vision_config=dict(depth=2, embed_dim=16, hidden_size=hidden, num_heads=2, mlp_ratio=2,
                           patch_size=4, spatial_merge_size=2, temporal_patch_size=2),
        image_token_id=ids['image_pad'], video_token_id=ids['video_pad'], tie_word_embeddings=True,
        vision_start_token_id=ids['vision_start'], vision_end_token_id=ids['vision_end'])
    torch.manual_seed(seed)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    pre = dict(image_processor_type='Qwen2VLImageProcessor', patch_size=4, merge_size=2,
               temporal_patch_size=2, size=dict(shortest_edge=256, longest_edge=256),
               image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28])
    Path(folder, 'preprocessor_config.json').write_text(json.dumps(pre))
    return str(folder)


@pytest.fixture(scope='session')
def tiny_qwen2vl(tmp_path_factory):
    return make_qwen2vl(tmp_path_factory.mktemp('tiny-qwen2-vl'))


def make_videochat_flash(folder, layers=3, hidden=32, seed=0, **config):
    """
    A random VideoChat-Flash, saved: frames of 72x72 in patches of 8, so 9x9 a frame, merged to 64
    tokens per clip. As with the public checkpoint, no token stands for a video and no file says
    how to prepare frames.
    """
    import torch
    from videochat_flash import VideoChatFlash, VideoChatFlashConfig
    tok = make_tokenizer(folder, SPECIAL[:3])
    vision = dict(num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=72,
                  patch_size=8)
    config = dict(vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden,
                  num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                  mm_hidden_size=32, vision_config=vision, eos_token_id=tok.eos_token_id) | config
    torch.manual_seed(seed)
    model = VideoChatFlash(VideoChatFlashConfig(**config))
    with torch.no_grad():  # off the zeros and ones, and so large that outputs don't look alike
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope='session')
def tiny_videochat_flash(tmp_path_factory):
    return make_videochat_flash(tmp_path_factory.mktemp('tiny-videochat-flash'))


def make_clip(folder, seed=0, pad='<|endoftext|>', **text):
    """A random CLIP of the native class, saved: frames of 16x16 in patches of 8, both towers alike.
    As in OpenAI's, the end token is also what pads."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator([WORDS] * 10, trainer)
    tok.add_special_tokens(['<|pad|>', '<|startoftext|>', '<|endoftext|>'])
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token='<|startoftext|>',
                                   eos_token='<|endoftext|>', pad_token=pad)
    fast.save_pretrained(folder)
    text = dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=40, bos_token_id=fast.bos_token_id,
                eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id) | text
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                  image_size=16, patch_size=8)
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
    with torch.no_grad():  # CLIP's start is so small that all outputs would look alike
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    pre = dict(image_processor_type='CLIPImageProcessor', image_mean=[0.48, 0.46, 0.41],
               image_std=[0.27, 0.26, 0.28], size=dict(shortest_edge=16))
    Path(folder, 'preprocessor_config.json').write_text(json.dumps(pre))
    return str(folder)


@pytest.fixture(scope='session')
def tiny_clip(tmp_path_factory):
    return make_clip(tmp_path_factory.mktemp('tiny-clip'))


def make_clips(folder, seed=0, **counts):
    """A data folder: <split>.jsonl and H.264 clips of 8 frames 32x32, one caption per clip."""
    import av
    import numpy as np
    rng = np.random.default_rng(seed)
    (folder / 'videos').mkdir()
    for split, n in counts.items():
        rows = []
        for i in range(n):
            color, way = ('red', 'green', 'blue')[i % 3], ('left', 'right', 'up', 'down')[i % 4]
            with av.open(folder / 'videos' / f'{split}{i}.mp4', 'w') as f:
                stream = f.add_stream('libx264', rate=8)
                stream.width, stream.height, stream.pix_fmt = 32, 32, 'yuv420p'
                for t in range(8):
                    frame = rng.integers(0, 40, (32, 32, 3), dtype=np.uint8)
                    y, x = {'left': (12, 22 - 2 * t), 'right': (12, 2 + 2 * t),
                            'up': (22 - 2 * t, 12), 'down': (2 + 2 * t, 12)}[way]
                    frame[y:y + 8, x:x + 8, ('red', 'green', 'blue').index(color)] = 250
                    f.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format='rgb24')))
                f.mux(stream.encode())
            then = ' then it grows' * (i % 2)  # two lengths, so that batches have padding
            rows.append(dict(id=f'{split}{i}', video=f'{split}{i}.mp4',
                             captions=[f'a {color} square moves {way}{then}']))
        text = ''.join(json.dumps(row) + '\n' for row in rows)
        (folder / f'{split}.jsonl').write_text(text, encoding='utf-8')
    return str(folder)


@pytest.fixture(scope='session')
def tiny_data(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp('tiny-data'), train=24, val=8, test=10)
