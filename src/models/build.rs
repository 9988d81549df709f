//! `meridian model build`: an engine for a GPU, built ahead of time by the vendor's tools into the model cache.
//!
//! What is run is a script that can be read first (`--dry-run`). It works in a folder beside its place, and the engine is put there in one
//! step when it is whole and described, so that a replica finds all of it or nothing.

use crate::cli::BuildOptions;
use crate::{FAILED, WRONG_USAGE, fail};
use anyhow::{Context, Result, anyhow, bail};
use regions::{EngineKind, Precision};
use replica::cache::{CachedModel, ModelCache, ModelSource, default_root};
use replica::engine::tensorrt::EngineRecordV1;
use replica::engine::tensorrt::build::{
    BUILT_WITH, BuildDirectories, EngineBuildOptions, EngineBuildPlan, SCRIPT, parse_built_with, plan,
};
use replica::engine::tensorrt::record::{self, ENGINE, FILE};
use replica::model::ModelDir;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Where the vendor's container keeps the examples.
const EXAMPLES: &str = "/app/tensorrt_llm/examples";

/// Runs the command.
pub(super) fn main(options: &BuildOptions) -> ExitCode {
    let source = match options.model.parse::<ModelSource>() {
        Ok(source) => source,
        Err(error) => return fail(WRONG_USAGE, &[error.to_string()]),
    };
    let kind = EngineKind::TensorrtLlm;
    if options.engine != kind.as_str() {
        let problem = format!("--engine {}: `{kind}` is the one that has to be built", options.engine);
        return fail(WRONG_USAGE, &[problem]);
    }
    let known = kind.precisions();
    let Some(precision) = known.iter().copied().find(|known| known.as_str() == options.precision) else {
        let known: Vec<&str> = known.iter().map(|known| known.as_str()).collect();
        let problem = format!("--precision {}: {kind} has {}", options.precision, known.join(", "));
        return fail(WRONG_USAGE, &[problem]);
    };
    match build(&source, precision, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &[format!("{error:#}")]),
    }
}

fn build(source: &ModelSource, precision: Precision, options: &BuildOptions) -> Result<()> {
    let root = default_root()
        .ok_or_else(|| anyhow!("none of MERIDIAN_CACHE, XDG_CACHE_HOME and HOME is set; set one"))?;
    let CachedModel { path, digest, .. } = ModelCache::new(&root).resolve(source)?;
    let model = ModelDir::open(&path)?;
    let place = record::folder(&root, &digest, precision);
    if !options.dry_run
        && !options.again
        && EngineRecordV1::read(&place).and_then(|record| record.check_files(&place)).is_ok()
    {
        eprintln!("{source}: built already, in {}; --again builds it once more", place.display());
        return Ok(());
    }
    let work = place.with_extension("part");
    let folders = match &options.container {
        Some(_) => {
            BuildDirectories { model: "/model".into(), work: "/build".into(), examples: EXAMPLES.into() }
        }
        None => BuildDirectories {
            model: path.canonicalize()?,
            work: work.clone(),
            examples: options.examples.clone(),
        },
    };
    let wanted = EngineBuildOptions {
        precision,
        max_batch_size: options.max_batch_size,
        max_tokens: options.max_tokens,
        max_batch_tokens: options.max_batch_tokens,
    };
    let build = plan(&model, &wanted, &folders).map_err(|problem| anyhow!(problem))?;
    let run = match &options.container {
        Some(image) => contained(image, &path.canonicalize()?, &work),
        None => vec!["sh".to_owned(), work.join(SCRIPT).display().to_string()],
    };
    if options.dry_run {
        print!("{}", shown(&build, &run, &work));
        return Ok(());
    }
    ready(options)?;
    fresh(&work)?;
    fs::write(work.join(SCRIPT), &build.script)?;
    for (name, program) in &build.programs {
        fs::write(work.join(name), program)?;
    }
    eprintln!("{source}: building in {}, which takes minutes", work.display());
    let status = Command::new(&run[0])
        .args(&run[1..])
        .status()
        .with_context(|| format!("{} cannot be started", run[0]))?;
    if !status.success() {
        bail!("the vendor's tools failed ({status}); what they did is in {}", work.display());
    }
    let record = recorded(&build, &work, digest, precision)?;
    let engine = work.join("engine");
    fs::write(engine.join(FILE), serde_json::to_vec_pretty(&record)?)?;
    put(&engine, &place)?;
    fs::remove_dir_all(&work).with_context(|| format!("{} cannot be removed", work.display()))?;
    let EngineRecordV1 { gpu, tensorrt, tensorrt_llm, .. } = record;
    eprintln!(
        "{source}: {precision} for {gpu}, TensorRT {tensorrt}, TensorRT-LLM {tensorrt_llm}, in {}",
        place.display()
    );
    Ok(())
}

/// Whether what is to be run is there; one sentence if not.
fn ready(options: &BuildOptions) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = |program: &str| std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if options.container.is_some() {
        if !on_path("docker") {
            bail!("--container needs `docker`, which is not on PATH; --dry-run shows what it would be given");
        }
        return Ok(());
    }
    let elsewhere = "run this in the vendor's container or Python environment, or give it one with --container IMAGE; \
                     --dry-run shows what is run";
    for program in ["trtllm-build", "python3", "nvidia-smi"] {
        if !on_path(program) {
            bail!("`{program}` is not on PATH: {elsewhere}");
        }
    }
    if !options.examples.is_dir() {
        let place = options.examples.display();
        bail!(
            "the examples of TensorRT-LLM, which hold its converters, are not in {place}: give --examples DIR, or {elsewhere}"
        );
    }
    Ok(())
}

/// The script in the vendor's container.
fn contained(image: &str, model: &Path, work: &Path) -> Vec<String> {
    let volumes = [format!("{}:/model:ro", model.display()), format!("{}:/build", work.display())];
    let script = format!("/build/{SCRIPT}");
    let words = [
        "docker",
        "run",
        "--rm",
        "--gpus",
        "all",
        "--ipc",
        "host",
        "-v",
        &volumes[0],
        "-v",
        &volumes[1],
        image,
        "sh",
    ];
    words.iter().map(|word| (*word).to_owned()).chain([script]).collect()
}

fn shown(build: &EngineBuildPlan, run: &[String], work: &Path) -> String {
    let mut text = String::new();
    for (name, program) in &build.programs {
        text.push_str(&format!("# {}\n{program}\n", work.join(name).display()));
    }
    text.push_str(&format!(
        "# {}\n{}\n# and then: {}\n",
        work.join(SCRIPT).display(),
        build.script,
        run.join(" ")
    ));
    text
}

/// An empty folder.
fn fresh(work: &Path) -> Result<()> {
    let cannot = || format!("{} cannot be made empty", work.display());
    if work.exists() {
        fs::remove_dir_all(work).with_context(cannot)?;
    }
    fs::create_dir_all(work).with_context(cannot)
}

/// What was built, and with what.
fn recorded(
    build: &EngineBuildPlan,
    work: &Path,
    digest: String,
    precision: Precision,
) -> Result<EngineRecordV1> {
    let said = fs::read_to_string(work.join(BUILT_WITH)).unwrap_or_default();
    let [gpu, tensorrt, tensorrt_llm] = parse_built_with(&said).map_err(|problem| anyhow!(problem))?;
    let engine = work.join("engine");
    let mut files = BTreeMap::new();
    let listed = fs::read_dir(&engine).with_context(|| format!("the tools left no {}", engine.display()))?;
    for entry in listed {
        let entry = entry?;
        let name = entry.file_name().to_str().map(str::to_owned).context("a file whose name is no text")?;
        files.insert(name, record::digest(&entry.path())?);
    }
    if !files.contains_key(ENGINE) {
        bail!("the tools left no {ENGINE} in {}", engine.display());
    }
    let EngineBuildPlan {
        form,
        tensor,
        max_batch_size,
        max_batch_tokens,
        max_tokens,
        script: _,
        programs: _,
    } = build;
    Ok(EngineRecordV1 {
        version: 1,
        model: digest,
        precision: precision.to_string(),
        tensor_parallel: 1,
        form: *form,
        tensor: tensor.clone(),
        max_batch_size: *max_batch_size,
        max_batch_tokens: *max_batch_tokens,
        max_tokens: *max_tokens,
        gpu,
        tensorrt,
        tensorrt_llm,
        test_double: false,
        files,
    })
}

/// Puts a folder in its place, and what was there aside.
fn put(engine: &Path, place: &Path) -> Result<()> {
    let old = place.with_extension("old");
    let cannot = || format!("{} cannot be put in its place", place.display());
    if old.exists() {
        fs::remove_dir_all(&old).with_context(cannot)?;
    }
    if place.exists() {
        fs::rename(place, &old).with_context(cannot)?;
    }
    fs::rename(engine, place).with_context(cannot)?;
    if old.exists() {
        fs::remove_dir_all(&old).with_context(cannot)?;
    }
    Ok(())
}
