//! `meridian model verify`: compares the engines of a model with the reference on a fixed set of texts.

use crate::cli::CheckOptions;
use crate::{EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_USAGE, fail};
use regions::{EngineKind, EngineSpec};
use replica::cache::ModelSource;
use replica::verify::judge::{CosineDistribution, DecisionAgreement, EngineVerdict, PrecisionRequirement};
use replica::verify::{REFERENCE, available_engines, run};
use std::process::ExitCode;

/// Runs the command.
pub(super) fn main(options: &CheckOptions) -> ExitCode {
    let (source, engines) = match check(options) {
        Ok(checked) => checked,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let verdicts = match verify(&source, engines) {
        Ok(verdicts) => verdicts,
        Err(problem) => return fail(EXIT_FAILED, &[problem]),
    };
    if options.json {
        println!("{}", serde_json::Value::from(verdicts.iter().map(json).collect::<Vec<_>>()));
    } else {
        let EngineSpec { kind, precision } = REFERENCE;
        println!("{source} compared with {kind} {precision}");
        verdicts.iter().for_each(|verdict| println!("{}", line(verdict)));
    }
    if verdicts.iter().all(EngineVerdict::holds) {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_CHECK_FAILED)
    }
}

/// Validates the options; returns the model and the requested engines.
fn check(options: &CheckOptions) -> Result<(ModelSource, Vec<EngineSpec>), Vec<String>> {
    let mut problems = Vec::new();
    let source = options.model.parse::<ModelSource>().map_err(|error| problems.push(error.to_string())).ok();
    let mut engines = Vec::new();
    for text in &options.engines {
        match engine(text) {
            Ok(REFERENCE) => {
                problems.push(format!("--engine {text} is the reference of the comparison; omit it"))
            }
            Ok(spec) if engines.contains(&spec) => problems.push(format!("--engine {text} is given twice")),
            Ok(spec) => engines.push(spec),
            Err(problem) => problems.push(format!("--engine {text}: {problem}")),
        }
    }
    source.filter(|_| problems.is_empty()).map(|source| (source, engines)).ok_or(problems)
}

/// Parses `kind:precision`.
fn engine(text: &str) -> Result<EngineSpec, String> {
    let (kind, precision) = text.split_once(':').ok_or("write it as cpu:int8 or tensorrt-llm:fp8")?;
    let kind: EngineKind = kind.parse().map_err(|error| format!("{error}"))?;
    let known = kind.precisions();
    let precision = known.iter().copied().find(|known| known.as_str() == precision).ok_or_else(|| {
        let known: Vec<&str> = known.iter().map(|known| known.as_str()).collect();
        format!("{kind} supports {}", known.join(", "))
    })?;
    Ok(EngineSpec { kind, precision })
}

fn verify(source: &ModelSource, engines: Vec<EngineSpec>) -> Result<Vec<EngineVerdict>, String> {
    let cache = super::cache()?;
    let cached = cache.resolve(source).map_err(|error| error.to_string())?;
    let engines = if engines.is_empty() { available_engines(cache.root(), &cached.digest) } else { engines };
    run(&cache, &cached, &engines).map_err(|error| error.to_string())
}

fn line(verdict: &EngineVerdict) -> String {
    let EngineVerdict { engine: EngineSpec { kind, precision }, cosines, agreement, broken } = verdict;
    let mut line = format!("{kind} {precision}: ");
    if let Some(CosineDistribution { count, mean, least, hundredth, tenth, median }) = cosines {
        line.push_str(&format!(
            "cosines of {count}: mean {mean:.5}, minimum {least:.5}, 1 % below {hundredth:.5}, 10 % below {tenth:.5}, \
             median {median:.5}; "
        ));
    }
    if let Some(DecisionAgreement { same, all }) = agreement {
        line.push_str(&format!("{same} of {all} decisions equal; "));
    }
    line.push_str(if broken.is_empty() { "passed" } else { "failed" });
    broken.iter().for_each(|what| line.push_str(&format!("\n  {what}")));
    line
}

fn json(verdict: &EngineVerdict) -> serde_json::Value {
    let EngineVerdict { engine: EngineSpec { kind, precision }, cosines, agreement, broken } = verdict;
    let PrecisionRequirement { mean, each, agreement: share } = PrecisionRequirement::of(*precision);
    let spread = cosines.map(|CosineDistribution { count, mean, least, hundredth, tenth, median }| {
        serde_json::json!({"count": count, "mean": mean, "least": least, "p1": hundredth, "p10": tenth, "p50": median})
    });
    let agreement =
        agreement.map(|DecisionAgreement { same, all }| serde_json::json!({"same": same, "all": all}));
    serde_json::json!({
        "engine": kind.as_str(),
        "precision": precision.as_str(),
        "holds": broken.is_empty(),
        "broken": broken,
        "cosines": spread,
        "agreement": agreement,
        "demand": {"mean": mean, "each": each, "agreement": share},
    })
}
