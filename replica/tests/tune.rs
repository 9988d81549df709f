//! From `meridian tune` to a replica that uses the tuned settings.

#[expect(dead_code, reason = "the harness of the HTTP tests can do more than is wanted here")]
mod served;

use std::fs;
use std::path::Path;
use std::time::Duration;

use replica::cache::{CachedModel, ModelCache, ModelSource};
use replica::tune::{Report, TuneEvent, TuneRequest};
use replica_core::Precision;
use served::{TestReplica, config, write_model};
use tempfile::TempDir;

/// Share of other processes that no machine exceeds: these tests run beside others.
const ANY_SHARE: f64 = 1.0;

/// Tunes the small model in `folder`, with the model cache of its replicas.
fn tune(folder: &Path, out: Option<&Path>, others_max: f64, keep_if_busy: bool) -> (Report, usize) {
    let cache = ModelCache::new(folder.join("cache"));
    let source: ModelSource = folder.to_str().expect("a path").parse().expect("a source");
    let model: CachedModel = cache.resolve(&source).expect("a model");
    let order = TuneRequest {
        model,
        precisions: vec![Precision::F32],
        target_p99: None,
        time: Duration::from_secs(3),
        out: out.map(Path::to_owned),
        plot: None,
        others_max,
        keep_if_busy,
    };
    let mut measured = 0;
    let mut count =
        |progress: TuneEvent| measured += usize::from(matches!(progress, TuneEvent::Measured { .. }));
    let report = replica::tune::run(&cache, order, &mut count).expect("settings");
    (report, measured)
}

fn model() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    write_model(folder.path());
    folder
}

/// Returns the batch settings that a replica reports.
fn batch_of(folder: &Path, toml: &str) -> serde_json::Value {
    let replica = TestReplica::with(config("127.0.0.1:0", folder, toml));
    assert_eq!(replica.vectors(&["w1 w2".to_owned()]).len(), 1, "it serves");
    replica.get("/info")["batch"].clone()
}

#[test]
fn a_replica_uses_the_settings_tuned_for_its_model_and_machine() {
    let folder = model();
    let untuned = batch_of(folder.path(), "");
    assert!(untuned["tuned"].is_null(), "{untuned}");

    let (report, measured) = tune(folder.path(), None, ANY_SHARE, false);
    assert!(measured > 3, "{measured} turns");
    let file = report.file.as_ref().expect("it was kept");
    let text = fs::read_to_string(file).expect("the file");
    assert!(text.contains(&report.tuned.digest) && text.contains("[[curve]]"), "{text}");
    assert!(fs::read_to_string(file.with_extension("svg")).expect("the plot").contains("<circle"));
    let [gain] = &report.gains[..] else { panic!("one precision: {:?}", report.gains) };
    assert!(gain.tokens_per_second_before > 0.0 && gain.tokens_per_second_after > 0.0);

    let tuned = batch_of(folder.path(), "");
    let chosen = report.choice().batch;
    assert_eq!(tuned["tuned"], file.to_str().expect("a path"));
    assert_eq!(tuned["batch_tokens"], chosen.batch_tokens);
    assert_eq!(tuned["interactive_batch_tokens"], chosen.interactive_batch_tokens);
    let own = batch_of(folder.path(), "[batch]\nbatch_tokens = 77\n");
    assert_eq!(
        (&own["batch_tokens"], &own["tuned"]),
        (&77.into(), &tuned["tuned"]),
        "the word itself ranks first"
    );
}

#[test]
fn nothing_is_kept_from_a_busy_machine_unless_requested() {
    let folder = model();
    let (report, _) = tune(folder.path(), None, -1.0, false);
    if let Err(reason) = report.others_share {
        // With a quota of CPU time, the share of other processes is unknown.
        assert!(report.file.is_some() && report.table().contains(&reason.to_string()), "{}", report.table());
        return;
    }
    assert_eq!((&report.file, &report.plot), (&None, &None));
    assert!(report.table().contains("not kept, because other processes used"), "{}", report.table());
    assert!(batch_of(folder.path(), "")["tuned"].is_null());

    let (report, _) = tune(folder.path(), None, -1.0, true);
    assert!(report.table().contains("kept, although other processes used"), "{}", report.table());
    let file = report.file.expect("it was kept");
    let text = fs::read_to_string(&file).expect("the file");
    assert!(
        text.contains("# The machine was busy") && text.contains("cpu_share_of_other_processes = "),
        "{text}"
    );
    assert_eq!(batch_of(folder.path(), "")["tuned"], file.to_str().expect("a path"));
}

#[test]
fn settings_of_another_model_or_machine_are_ignored() {
    let folder = model();
    let out = folder.path().join("elsewhere.toml");
    let (report, _) = tune(folder.path(), Some(&out), ANY_SHARE, false);
    assert_eq!(report.file.as_ref(), Some(&out));
    let named = format!("tuned = {out:?}\n");
    assert_eq!(batch_of(folder.path(), &named)["tuned"], out.to_str().expect("a path"));
    assert!(batch_of(folder.path(), "")["tuned"].is_null(), "no file was written to the cache");

    let text = fs::read_to_string(&out).expect("the file");
    for (from, to) in
        [(report.tuned.digest.as_str(), "0000"), (report.tuned.hardware.processor.as_str(), "a 6502")]
    {
        fs::write(&out, text.replace(from, to)).expect("a file");
        assert!(batch_of(folder.path(), &named)["tuned"].is_null(), "{to}");
    }
}
