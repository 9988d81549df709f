//! `meridian model build`: builds an engine for a GPU with NVIDIA's tools, into the model cache.
//!
//! The build is a script that can be inspected with `--dry-run`. It runs in a working directory next to the target, and the
//! complete engine with its record is moved to the target in one step, so that a replica finds all of it or none.

use crate::cli::BuildOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail};
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

/// Directory of the examples in NVIDIA's container.
const EXAMPLES: &str = "/app/tensorrt_llm/examples";

/// Runs the command.
pub(super) fn main(options: &BuildOptions) -> ExitCode {
    let source = match options.model.parse::<ModelSource>() {
        Ok(source) => source,
        Err(error) => return fail(EXIT_USAGE, &[error.to_string()]),
    };
    let kind = EngineKind::TensorrtLlm;
    if options.engine != kind.as_str() {
        let problem = format!("--engine {}: only `{kind}` engines are built", options.engine);
        return fail(EXIT_USAGE, &[problem]);
    }
    let known = kind.precisions();
    let Some(precision) = known.iter().copied().find(|known| known.as_str() == options.precision) else {
        let known: Vec<&str> = known.iter().map(|known| known.as_str()).collect();
        let problem = format!("--precision {}: {kind} supports {}", options.precision, known.join(", "));
        return fail(EXIT_USAGE, &[problem]);
    };
    match build(&source, precision, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(EXIT_FAILED, &[format!("{error:#}")]),
    }
}

fn build(source: &ModelSource, precision: Precision, options: &BuildOptions) -> Result<()> {
    let root = default_root()
        .ok_or_else(|| anyhow!("none of MERIDIAN_CACHE, XDG_CACHE_HOME and HOME is set; set one"))?;
    let CachedModel { path, digest, .. } = ModelCache::new(&root).resolve(source)?;
    let model = ModelDir::open(&path)?;
    let target = record::folder(&root, &digest, precision);
    if !options.dry_run
        && !options.again
        && EngineRecordV1::read(&target).and_then(|record| record.check_files(&target)).is_ok()
    {
        eprintln!("{source}: already built, in {}; use --again to rebuild it", target.display());
        return Ok(());
    }
    let work = target.with_extension("part");
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
        Some(image) => docker_command(image, &path.canonicalize()?, &work),
        None => vec!["sh".to_owned(), work.join(SCRIPT).display().to_string()],
    };
    if options.dry_run {
        print!("{}", format_plan(&build, &run, &work));
        return Ok(());
    }
    check_tools(options)?;
    recreate(&work)?;
    fs::write(work.join(SCRIPT), &build.script)?;
    for (name, program) in &build.programs {
        fs::write(work.join(name), program)?;
    }
    eprintln!("{source}: building in {}; this takes minutes", work.display());
    let status = Command::new(&run[0])
        .args(&run[1..])
        .status()
        .with_context(|| format!("{} cannot be started", run[0]))?;
    if !status.success() {
        bail!("NVIDIA's tools failed ({status}); their output is in {}", work.display());
    }
    let record = build_record(&build, &work, digest, precision)?;
    let engine = work.join("engine");
    fs::write(engine.join(FILE), serde_json::to_vec_pretty(&record)?)?;
    replace(&engine, &target)?;
    fs::remove_dir_all(&work).with_context(|| format!("{} cannot be removed", work.display()))?;
    let EngineRecordV1 { gpu, tensorrt, tensorrt_llm, .. } = record;
    eprintln!(
        "{source}: {precision} for {gpu}, TensorRT {tensorrt}, TensorRT-LLM {tensorrt_llm}, in {}",
        target.display()
    );
    Ok(())
}

/// Checks that the required programs are installed.
fn check_tools(options: &BuildOptions) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = |program: &str| std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if options.container.is_some() {
        if !on_path("docker") {
            bail!("--container needs `docker`, which is not on PATH; --dry-run shows its command line");
        }
        return Ok(());
    }
    let fix = "run this in NVIDIA's container or Python environment, or give a container with --container IMAGE; \
               --dry-run shows the commands";
    for program in ["trtllm-build", "python3", "nvidia-smi"] {
        if !on_path(program) {
            bail!("`{program}` is not on PATH: {fix}");
        }
    }
    if !options.examples.is_dir() {
        let dir = options.examples.display();
        bail!(
            "TensorRT-LLM's examples, which contain its converters, are not in {dir}: give --examples DIR, or {fix}"
        );
    }
    Ok(())
}

/// Returns the command that runs the script in NVIDIA's container.
fn docker_command(image: &str, model: &Path, work: &Path) -> Vec<String> {
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

fn format_plan(build: &EngineBuildPlan, run: &[String], work: &Path) -> String {
    let mut text = String::new();
    for (name, program) in &build.programs {
        text.push_str(&format!("# {}\n{program}\n", work.join(name).display()));
    }
    text.push_str(&format!(
        "# {}\n{}\n# run: {}\n",
        work.join(SCRIPT).display(),
        build.script,
        run.join(" ")
    ));
    text
}

/// Creates an empty directory.
fn recreate(work: &Path) -> Result<()> {
    let cannot = || format!("{} cannot be emptied", work.display());
    if work.exists() {
        fs::remove_dir_all(work).with_context(cannot)?;
    }
    fs::create_dir_all(work).with_context(cannot)
}

/// Creates the record of the built engine and the versions of its tools.
fn build_record(
    build: &EngineBuildPlan,
    work: &Path,
    digest: String,
    precision: Precision,
) -> Result<EngineRecordV1> {
    let versions = fs::read_to_string(work.join(BUILT_WITH)).unwrap_or_default();
    let [gpu, tensorrt, tensorrt_llm] = parse_built_with(&versions).map_err(|problem| anyhow!(problem))?;
    let engine = work.join("engine");
    let mut files = BTreeMap::new();
    let listed =
        fs::read_dir(&engine).with_context(|| format!("the tools created no {}", engine.display()))?;
    for entry in listed {
        let entry = entry?;
        let name = entry.file_name().to_str().map(str::to_owned).context("a file name is not UTF-8")?;
        files.insert(name, record::digest(&entry.path())?);
    }
    if !files.contains_key(ENGINE) {
        bail!("the tools created no {ENGINE} in {}", engine.display());
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

/// Moves a directory to its target, and removes the previous one.
fn replace(engine: &Path, target: &Path) -> Result<()> {
    let old = target.with_extension("old");
    let cannot = || format!("{} cannot be replaced", target.display());
    if old.exists() {
        fs::remove_dir_all(&old).with_context(cannot)?;
    }
    if target.exists() {
        fs::rename(target, &old).with_context(cannot)?;
    }
    fs::rename(engine, target).with_context(cannot)?;
    if old.exists() {
        fs::remove_dir_all(&old).with_context(cannot)?;
    }
    Ok(())
}
