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


def make_tokenizer(folder, special=SPECIAL, eos='<|im_end|>', pad='<|endoftext|>', **names):
    """A byte-level BPE tokenizer with a family's special tokens (Qwen2's), learned on a handful of
    words. names: special tokens that the family's processor asks the tokenizer for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator([WORDS] * 10, trainer)
    tok.add_special_tokens(special)
    from transformers import PreTrainedTokenizerFast
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=eos, pad_token=pad,
                                   additional_special_tokens=special, extra_special_tokens=names)
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


CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
IMAGENET = dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])


def make_family(folder, family, real=False, layers=3, hidden=32, seed=0, initializer_range=0.2):
    """
    A random checkpoint of a family's own class, saved as the public ones are: config.json, weights,
    tokenizer, the processors' files. real: patches and frames are as large as the public one's (the
    widths stay tiny); else a frame of 16x16 is 4 tokens. Weights are larger than usual: embeddings
    of a flat model are all alike, and gradients vanish.
    """
    import torch
    import transformers
    folder = Path(folder)
    if family == 'qwen2_vl' and not real:
        return make_qwen2vl(folder, layers, hidden, seed, initializer_range=initializer_range)
    head = dict(eos='<|im_end|>', pad='<|endoftext|>', special=SPECIAL)
    if family == 'internvl':
        head['special'] = SPECIAL[:3] + ['<img>', '</img>', '<IMG_CONTEXT>', '<video>']
        head |= dict(start_image_token='<img>', end_image_token='</img>', video_token='<video>',
                     context_image_token='<IMG_CONTEXT>')
    elif family == 'smolvlm':
        head = dict(eos='<end_of_utterance>', pad='<|im_end|>', special=[
            '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<end_of_utterance>', '<image>',
            '<fake_token_around_image>', '<global-img>', '<row_1_col_1>'])
    tok = make_tokenizer(folder, **head)
    id_of = tok.convert_tokens_to_ids
    text = dict(vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden,
                num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                bos_token_id=None, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
                tie_word_embeddings=True, initializer_range=initializer_range)
    start = dict(initializer_range=initializer_range)
    section = [hidden // 8 - 2 * (hidden // 24), hidden // 24, hidden // 24]  # sums to head_dim / 2
    rope = dict(rope_type='default', rope_theta=1e6, mrope_section=section)
    qwen = dict(tie_word_embeddings=True, **{f'{k}_token_id': id_of(f'<|{name}|>') for k, name in (
        ('image', 'image_pad'), ('video', 'video_pad'), ('vision_start', 'vision_start'),
        ('vision_end', 'vision_end'))}) if SPECIAL is head['special'] else {}
    patch = {'qwen3_vl': 16}.get(family, 14) if real else 4
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                  patch_size=patch, **start)
    pre = dict(patch_size=patch, merge_size=2, temporal_patch_size=2)
    files = {}
    if family in ('qwen2_vl', 'qwen2_5_vl'):
        name = {'qwen2_vl': 'Qwen2VL', 'qwen2_5_vl': 'Qwen2_5_VL'}[family]
        own = dict(embed_dim=16, hidden_size=hidden, mlp_ratio=2) if family == 'qwen2_vl' else dict(
            hidden_size=16, out_hidden_size=hidden, intermediate_size=32, fullatt_block_indexes=[1],
            window_size=4 * patch, tokens_per_second=2)
        config = getattr(transformers, f'{name}Config')(
            text_config=dict(text, rope_parameters=rope), **qwen,
            vision_config=dict(depth=2, num_heads=2, patch_size=patch, **own, **start))
        pre |= dict(image_processor_type='Qwen2VLImageProcessor', image_mean=CLIP_MEAN,
                    image_std=CLIP_STD, min_pixels=56 * 56 if real else 256,
                    max_pixels=28 * 28 * 16384 if real else 1024)
    elif family == 'qwen3_vl':
        name = 'Qwen3VL'
        config = transformers.Qwen3VLConfig(
            text_config=dict(text, head_dim=hidden // 4,
                             rope_parameters=dict(rope, mrope_interleaved=True)),
            vision_config=dict(depth=3, hidden_size=16, out_hidden_size=hidden, num_heads=2,
                               intermediate_size=32, patch_size=patch, num_position_embeddings=16,
                               deepstack_visual_indexes=[0, 1], **start), **qwen)
        pre |= dict(image_processor_type='Qwen2VLImageProcessor', **HALF,
                    size=dict(shortest_edge=256 * 256, longest_edge=16777216) if real else
                    dict(shortest_edge=256, longest_edge=1024))
        files['video_preprocessor_config.json'] = pre | dict(
            video_processor_type='Qwen3VLVideoProcessor', cap_pixels_per_frame=True,
            size=dict(shortest_edge=4096, longest_edge=25165824) if real else
            dict(shortest_edge=64, longest_edge=2048))
        del files['video_preprocessor_config.json']['image_processor_type']
    elif family == 'internvl':
        name, side = 'InternVL', 448 if real else 16
        config = transformers.InternVLConfig(
            text_config=dict(text, model_type='qwen2'), image_token_id=id_of('<IMG_CONTEXT>'),
            vision_config=dict(vision, image_size=[side, side], patch_size=[patch, patch],
                               attention_bias=True), image_seq_length=(side // patch // 2) ** 2)
        pre = dict(image_processor_type='GotOcr2ImageProcessor', crop_to_patches=False, **IMAGENET,
                   size=dict(height=side, width=side))
        files = {'video_preprocessor_config.json': dict(
            video_processor_type='InternVLVideoProcessor', **IMAGENET, size=pre['size']),
            'processor_config.json': dict(image_seq_length=(side // patch // 2) ** 2)}
    elif family == 'video_llama_3':
        name = 'VideoLlama3'
        config = transformers.VideoLlama3Config(
            text_config=dict(text, model_type='qwen2'), vision_config=vision,
            image_token_id=qwen['image_token_id'], video_token_id=qwen['video_token_id'])
        pre = dict(patch_size=patch, temporal_patch_size=1, merge_size=1, **HALF, min_pixels=256,
                   image_processor_type='VideoLlama3ImageProcessor', max_pixels=3211264)
        files['video_preprocessor_config.json'] = dict(
            patch_size=patch, temporal_patch_size=1, merge_size=2, **HALF,
            min_pixels=12544 if real else 256, max_pixels=12845056 if real else 2048,
            video_processor_type='VideoLlama3VideoProcessor', use_token_compression=True)
    else:
        name, side, scale = 'SmolVLM', *((384, 3) if real else (16, 2))
        config = transformers.SmolVLMConfig(
            text_config=dict(text, model_type='llama'), image_token_id=id_of('<image>'),
            vision_config=dict(vision, image_size=side), scale_factor=scale,
            tie_word_embeddings=True, pad_token_id=tok.pad_token_id)
        pre = dict(image_processor_type='SmolVLMImageProcessor', **HALF, resample=1,
                   size=dict(longest_edge=4 * side), max_image_size=dict(longest_edge=side),
                   video_sampling=dict(fps=1, max_frames=64, video_size=dict(longest_edge=side)))
        files['processor_config.json'] = dict(image_seq_len=(side // patch // scale) ** 2)
    torch.manual_seed(seed)
    model = getattr(transformers, f'{name}ForConditionalGeneration')(config)
    with torch.no_grad():  # a few start at zero, such as position embeddings
        for p in model.parameters():
            if not p.any():
                p.normal_(0, initializer_range)
    model.save_pretrained(folder)
    for file, content in {'preprocessor_config.json': pre, **files}.items():
        (folder / file).write_text(json.dumps(content))
    return str(folder)


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


@pytest.fixture(scope='session')
def files(tmp_path_factory):
    from clips import make_files
    return make_files(tmp_path_factory.mktemp('videos'))
