//! Tests of loading an engine: shared packed weights, and invalid checkpoints.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use replica::engine::cpu::{CpuEngine, CpuLoadError, CpuOptions, Isa, PackedCache, WeightsLocation};
use replica::model::{ModelDir, ModelError, TensorProblem};
use replica_core::Precision;

use super::{cases, check_small, copy_of, golden, load, options};

#[test]
fn packed_weights_are_written_once_and_shared() {
    let cache = tempfile::tempdir().unwrap();
    let cases = cases("small_bert_mean");
    let load_shared = |digest: &str| {
        let options =
            CpuOptions { packed: Some(PackedCache::below(cache.path(), digest)), ..options(1, Isa::best()) };
        let engine = load(&golden("small_bert_mean"), options);
        check_small(&engine, &cases).unwrap();
        match engine.weights_location() {
            WeightsLocation::SharedFile(path) => path.clone(),
            place => panic!("{place:?}"),
        }
    };
    // Concurrently, as replicas of one model start.
    let paths: Vec<PathBuf> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..4).map(|_| scope.spawn(|| load_shared("abc"))).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    assert!(paths.iter().all(|path| *path == paths[0]));
    let written = fs::metadata(&paths[0]).unwrap().modified().unwrap();
    load_shared("abc");
    assert_eq!(fs::metadata(&paths[0]).unwrap().modified().unwrap(), written, "it was written again");
    assert_eq!(fs::read_dir(cache.path().join("packed")).unwrap().count(), 1);

    // An incomplete file, or one of another model, is written again.
    let whole = fs::read(&paths[0]).unwrap();
    replace(&paths[0], &whole[..whole.len() - 4]);
    load_shared("abc");
    assert_eq!(fs::read(&paths[0]).unwrap(), whole);
    replace(&paths[0], &fs::read(load_shared("abd")).unwrap());
    load_shared("abc");
    assert_eq!(fs::read(&paths[0]).unwrap(), whole);

    // So is a file in which a single byte differs, at any position.
    for place in [4096, whole.len() / 2, whole.len() - 1] {
        let mut altered = whole.clone();
        altered[place] ^= 0x40;
        replace(&paths[0], &altered);
        load_shared("abc");
        assert_eq!(fs::read(&paths[0]).unwrap(), whole, "byte {place}");
    }
}

#[test]
fn packed_weights_are_private_to_their_user() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("packed");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    // As written by an earlier version.
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
    let load_shared = || {
        let options =
            CpuOptions { packed: Some(PackedCache::below(cache.path(), "abc")), ..options(1, Isa::best()) };
        match load(&golden("small_bert_mean"), options).weights_location() {
            WeightsLocation::SharedFile(path) => path.clone(),
            place => panic!("{place:?}"),
        }
    };
    let path = load_shared();
    assert_eq!((mode(&folder), mode(&path)), (0o700, 0o400));
    let written = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let first = written(&path);
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    load_shared();
    assert!(written(&path) > first, "a file that others can read or write is made anew");
    assert_eq!(mode(&path), 0o400);
    // A symbolic link is not followed.
    let elsewhere = cache.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    load_shared();
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
}

/// Replaces the content of a read-only file.
fn replace(path: &Path, content: &[u8]) {
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    fs::write(path, content).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o400)).unwrap();
}

#[test]
fn weights_that_are_not_finite_are_rejected_with_the_tensor() {
    let whole = fs::read(golden("small_bert_cls").join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let mut tried = 0;
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let used = !name.contains("pooler") && !name.contains("position_ids");
        for (value, precision) in [(f32::NAN, Precision::F32), (f32::INFINITY, Precision::Int8)] {
            let copy = copy_of(&golden("small_bert_cls"));
            let start = 8 + length + entry["data_offsets"][0].as_u64().unwrap() as usize;
            let mut spoiled = whole.clone();
            spoiled[start + 8..start + 12].copy_from_slice(&value.to_le_bytes());
            fs::write(copy.path().join("model.safetensors"), spoiled).unwrap();
            let model = ModelDir::open(copy.path()).unwrap();
            let options = CpuOptions { precision, ..options(1, Isa::best()) };
            let checked = CpuEngine::check_weights(&model).map_err(|error| error.to_string());
            let loaded = CpuEngine::load(&model, options).map(drop).map_err(|error| error.to_string());
            let (Err(checked), Err(loaded)) = (checked, loaded) else {
                assert!(!used, "{name} is used, and {value} in it was taken");
                continue;
            };
            assert_eq!(checked, loaded);
            assert!(loaded.contains(&format!("tensor `{name}` contains {value} at row")), "{loaded}");
            tried += 1;
        }
    }
    assert!(tried >= 2 * 37, "{tried}");
}

/// A projection after the model, whose effect the vectors would lack.
#[test]
fn an_unused_tensor_is_rejected_by_name() {
    let copy = copy_of(&golden("small_bert_cls"));
    let path = copy.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let data = whole.len() - 8 - length;
    let entry = serde_json::json!({"dtype": "F32", "shape": [1], "data_offsets": [data, data + 4]});
    header.insert("projection.weight".to_owned(), entry);
    let header = serde_json::to_vec(&header).unwrap();
    let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &whole[8 + length..], &[0; 4]];
    fs::write(&path, parts.concat()).unwrap();
    let model = ModelDir::open(copy.path()).unwrap();
    let checked = CpuEngine::check_weights(&model).unwrap_err().to_string();
    let loaded = CpuEngine::load(&model, options(1, Isa::best())).err().unwrap().to_string();
    assert_eq!(checked, loaded);
    assert!(loaded.contains("tensor `projection.weight` is not used by the model"), "{loaded}");
    assert!(loaded.contains("`architectures`") && loaded.contains("in config.json"), "{loaded}");
}

#[test]
fn all_problems_of_tensors_are_reported_together() {
    let copy = copy_of(&golden("small_bert_cls"));
    let path = copy.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    let config = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    fs::write(&path, config.replace("\"vocab_size\": 200", "\"vocab_size\": 201")).unwrap();
    let problems = replica::validate::problems(copy.path());
    // These models have no tokenizer, which is reported before anything else.
    assert!(problems.len() == 1 && problems[0].contains("no tokenizer.json"), "{problems:?}");
    let model = ModelDir::open(copy.path()).unwrap();
    let problems = CpuEngine::check_weights(&model).unwrap_err().into_all();
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 17, "{problems:#?}");
    assert!(problems[0].contains("word_embeddings.weight` has the shape [200, 64]"), "{problems:?}");
    assert_eq!(problems.iter().filter(|problem| problem.contains("encoder.layer.2.")).count(), 16);
}

#[test]
fn packed_weights_are_private_memory_if_they_cannot_be_written() {
    let cache = tempfile::tempdir().unwrap();
    fs::write(cache.path().join("packed"), "a file where the folder should be").unwrap();
    let options =
        CpuOptions { packed: Some(PackedCache::below(cache.path(), "abc")), ..options(1, Isa::best()) };
    let engine = load(&golden("small_bert_cls"), options);
    assert!(matches!(engine.weights_location(), WeightsLocation::PrivateMemory { problem: Some(_) }));
    check_small(&engine, &cases("small_bert_cls")).unwrap();
}

#[test]
fn a_checkpoint_of_another_model_is_rejected_with_the_tensor() {
    for (key, given, tensor, expected, actual) in [
        (
            "\"vocab_size\": 200",
            "\"vocab_size\": 201",
            "embeddings.word_embeddings.weight",
            [201, 64],
            [200, 64],
        ),
        (
            "\"intermediate_size\": 128",
            "\"intermediate_size\": 96",
            "encoder.layer.0.intermediate.dense.weight",
            [96, 64],
            [128, 64],
        ),
    ] {
        let (name, problem) = refused(|folder| {
            let path = folder.join("config.json");
            let config = fs::read_to_string(&path).unwrap();
            fs::write(&path, config.replace(key, given)).unwrap();
        });
        let (expected, actual) = (expected.to_vec(), actual.to_vec());
        assert_eq!((name.as_str(), problem), (tensor, TensorProblem::Shape { expected, actual }));
    }
    let (name, problem) = refused(|folder| {
        let path = folder.join("config.json");
        let config = fs::read_to_string(&path).unwrap();
        fs::write(&path, config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3")).unwrap();
    });
    assert_eq!(name, "encoder.layer.2.attention.self.query.weight");
    assert_eq!(problem, TensorProblem::Missing);
}

#[test]
fn a_truncated_checkpoint_is_rejected_with_the_tensor() {
    let (_, problem) = refused(|folder| {
        let path = folder.join("model.safetensors");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    });
    assert!(matches!(problem, TensorProblem::Truncated { .. }), "{problem:?}");
}

#[test]
fn tensors_with_the_prefix_of_the_model_are_found() {
    let copy = copy_of(&golden("small_bert_cls"));
    let path = copy.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&file[8..8 + length]).unwrap();
    let header =
        header.replace("\"embeddings.", "\"bert.embeddings.").replace("\"encoder.", "\"bert.encoder.");
    let mut renamed = (header.len() as u64).to_le_bytes().to_vec();
    renamed.extend(header.as_bytes());
    renamed.extend(&file[8 + length..]);
    fs::write(&path, renamed).unwrap();
    let engine = load(copy.path(), options(1, Isa::best()));
    check_small(&engine, &cases("small_bert_cls")).unwrap();
}

#[test]
fn pooling_without_the_tokens_of_a_prompt_is_rejected_if_there_are_prompts() {
    let copy = copy_of(&golden("small_bert_mean"));
    let pooling = r#"{"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": false}"#;
    fs::write(copy.path().join("1_Pooling/config.json"), pooling).unwrap();
    load(copy.path(), options(1, Isa::best()));
    let prompts = r#"{"prompts": {"query": "find: "}}"#;
    fs::write(copy.path().join("config_sentence_transformers.json"), prompts).unwrap();
    let model = ModelDir::open(copy.path()).unwrap();
    let error = CpuEngine::load(&model, options(1, Isa::best())).err().unwrap().to_string();
    assert!(error.contains("`include_prompt` = false is not supported"), "{error}");
}

/// Returns the tensor for which a modified copy of the small model is rejected, and the problem.
fn refused(change: impl FnOnce(&Path)) -> (String, TensorProblem) {
    let copy = copy_of(&golden("small_bert_cls"));
    change(copy.path());
    let loaded = ModelDir::open(copy.path())
        .map_err(CpuLoadError::from)
        .and_then(|model| CpuEngine::load(&model, options(1, Isa::best())));
    match loaded.err() {
        Some(CpuLoadError::Model(error)) => match error.into_all().swap_remove(0) {
            ModelError::Tensor { tensor, problem, .. } => (tensor, problem),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}
