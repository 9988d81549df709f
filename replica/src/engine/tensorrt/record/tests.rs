//! Tests of the checks of a record.

use super::*;

const DIGEST: &str = "abc";

fn record() -> EngineRecordV1 {
    EngineRecordV1 {
        version: 1,
        model: DIGEST.to_owned(),
        precision: "fp8".to_owned(),
        tensor_parallel: 1,
        form: Form::DecoderPooled,
        tensor: "pooled".to_owned(),
        max_batch_size: 16,
        max_batch_tokens: 8192,
        max_tokens: 512,
        gpu: "NVIDIA H200".to_owned(),
        tensorrt: "10.14.1".to_owned(),
        tensorrt_llm: "1.2.1".to_owned(),
        test_double: false,
        files: BTreeMap::from([(ENGINE.to_owned(), String::new())]),
    }
}

fn environment() -> EngineEnvironment {
    EngineEnvironment {
        gpus: vec!["NVIDIA H200".to_owned(), "NVIDIA L4".to_owned()],
        tensorrt: "10.14.1".to_owned(),
        tensorrt_llm: "1.2.1".to_owned(),
        test_double: false,
    }
}

#[test]
fn an_engine_for_another_environment_is_rejected_with_the_difference() {
    let valid = |record: &EngineRecordV1, environment: &EngineEnvironment| {
        record.check(Path::new("/e"), DIGEST, Precision::Fp8, environment)
    };
    valid(&record(), &environment()).unwrap();
    type Change = fn(&mut EngineRecordV1, &mut EngineEnvironment);
    let changes: [(Change, &str); 9] = [
        (|record, _| record.model = "def".to_owned(), "the model def, and this machine has abc"),
        (|record, _| record.precision = "bf16".to_owned(), "the precision bf16, and this machine has fp8"),
        (|record, _| record.tensor_parallel = 2, "the number of GPUs 2"),
        (
            |record, _| record.gpu = "NVIDIA A100".to_owned(),
            "NVIDIA A100, and this machine has NVIDIA H200, NVIDIA L4",
        ),
        (|_, environment| environment.gpus.clear(), "this machine has none"),
        (
            |_, environment| environment.tensorrt = "10.15.0".to_owned(),
            "TensorRT 10.14.1, and this machine has 10.15.0",
        ),
        (
            |_, environment| environment.tensorrt_llm = "1.2.0".to_owned(),
            "TensorRT-LLM 1.2.1, and this machine has 1.2.0",
        ),
        (|record, _| record.test_double = true, "one of the test double of TensorRT"),
        (|_, environment| environment.test_double = true, "this program has its test double"),
    ];
    for (change, sentence) in changes {
        let (mut record, mut environment) = (record(), environment());
        change(&mut record, &mut environment);
        let error = valid(&record, &environment).unwrap_err().to_string();
        assert!(error.contains(sentence) && error.contains("/e"), "{error}");
    }
}

#[test]
fn files_are_compared_with_the_record() {
    let folder = tempfile::tempdir().unwrap();
    let error = || EngineRecordV1::read(folder.path()).unwrap_err().to_string();
    assert!(error().contains("meridian model build"), "{}", error());
    let write = |record: &EngineRecordV1| {
        fs::write(folder.path().join(FILE), serde_json::to_vec(record).unwrap()).unwrap();
    };
    let mut valid = record();
    valid.files.insert(
        ENGINE.to_owned(),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".to_owned(),
    );
    write(&valid);
    assert_eq!(EngineRecordV1::read(folder.path()).unwrap(), valid);
    assert!(
        valid.check_files(folder.path()).unwrap_err().to_string().contains("rank0.engine cannot be read")
    );
    fs::write(folder.path().join(ENGINE), "abc").unwrap();
    valid.check_files(folder.path()).unwrap();
    fs::write(folder.path().join(ENGINE), "abd").unwrap();
    assert!(
        valid
            .check_files(folder.path())
            .unwrap_err()
            .to_string()
            .contains("differs from the one that was built")
    );

    for (change, sentence) in [
        ((|record| record.version = 2) as fn(&mut EngineRecordV1), "`version` is 2"),
        (|record| record.files.clear(), "no rank0.engine"),
        (|record| record.max_batch_size = 0, "a limit is 0"),
        (|record| record.max_tokens = 8193, "fits no batch"),
    ] {
        let mut wrong = record();
        change(&mut wrong);
        write(&wrong);
        assert!(error().contains(sentence), "{}", error());
    }
    fs::write(folder.path().join(FILE), "{\"version\": 1, \"more\": 2}").unwrap();
    assert!(error().contains("unknown field"), "{}", error());
}
