# Reserved fields, which had to be 0, that have a name since; 0 is their default.
/^typedef struct fsdp_model_options {/,/^} fsdp_model_options;/s/uint32_t reserved; /int32_t view_kind; /
/^typedef struct fsdp_param {/,/^} fsdp_param;/s/uint32_t reserved; /int32_t missing_grad; /
